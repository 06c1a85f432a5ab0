"""vLLM follows the rollout pointer of our registry: what ``--middleware`` names, ``DraftWeights`` goes with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import Counter, Gauge

from osd.registry.pointer_file import Rollout
from osd.vllm.published import Published
from osd.vllm.settings import SettingsError, VllmSettings

log = logging.getLogger("vllm.osd")  # vLLM shows what its own loggers say

VERSION = "osd_draft_version"
"""The metric, beside vLLM's own, of which version drafts."""

_PERIOD, _LOOK_SECONDS, _READ_SECONDS, _REFUSED_SECONDS = 1.0, 0.05, 120.0, 60.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class RolloutFollower:
    """Passes every request on, and while the server runs, puts in its draft model what the pointer names.

    That is the canary, while there is one and this vLLM tries canaries, else the stable version.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer as the server does; start with it, and end with it."""
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)
        try:
            follower = _Follower(scope["app"].state.engine_client)
        except SettingsError as error:
            await receive()
            # Said so, it ends the server; one that only raises goes on without what it was asked to follow.
            return await send({"type": "lifespan.startup.failed", "message": str(error)})
        following = asyncio.ensure_future(follower.follow())
        try:
            await self._app(scope, receive, send)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following


class _Follower:
    """Compares what drafts with the pointer once a second; ``engine`` is vLLM's client of its engine.

    Raises:
        SettingsError: there is nothing to follow.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, settings = engine, VllmSettings.from_environment()
        speculative = engine.vllm_config.speculative_config
        self._published = Published(settings, None if speculative is None else speculative.model)
        self._canary, self._now = settings.canary, self._published.started
        self._refused: dict[int, float] = {}  # and when that may be otherwise
        self._failing = False
        self._version, self._rejected = _metrics()
        self._version.labels(self._published.domain).set(self._now)

    async def follow(self) -> None:
        """Go on until it is cancelled."""
        while True:
            try:
                await self._look()
                self._failing = False
            except Exception as error:  # a registry that is gone, or vLLM itself: the next look tries again
                if not self._failing:
                    log.warning("draft weights are not followed for now: %s", " ".join(str(error).split()))
                self._failing = True
            await asyncio.sleep(_PERIOD)

    async def _look(self) -> None:
        rollout = await asyncio.to_thread(self._published.rollout)
        wanted = self._now if rollout is None else self._wanted(rollout)
        if wanted == self._now or self._is_refused(wanted):
            return
        if problems := await self._read(wanted):
            self._refused[wanted] = time.monotonic() + _REFUSED_SECONDS
            self._rejected.labels(self._published.domain).inc()
            log.error("version %d is not loaded, version %d goes on: %s", wanted, self._now, problems[0])
            return
        hashes = set(await self._engine.collective_rpc("osd_load_draft", args=(wanted,)))
        self._now = wanted
        self._version.labels(self._published.domain).set(wanted)
        log.info("version %d of %s drafts now, sha256 %s", wanted, self._published.domain, ", ".join(hashes))

    def _wanted(self, rollout: Rollout) -> int:
        canary = rollout.canary
        return canary if canary is not None and self._canary and not self._is_refused(canary) else rollout.stable

    def _is_refused(self, number: int) -> bool:
        return time.monotonic() < self._refused.get(number, 0.0)

    async def _read(self, number: int) -> list[str]:
        """Have every worker read a version; returns what is wrong with it.

        Raises:
            TimeoutError: reading takes too long.
        """
        await self._engine.collective_rpc("osd_read_draft", args=(number,))
        async with asyncio.timeout(_READ_SECONDS):
            while None in (found := await self._engine.collective_rpc("osd_draft_read", args=(number,))):
                await asyncio.sleep(_LOOK_SECONDS)
        return [problem for problem in found if problem]


def _metrics() -> tuple[Gauge, Counter]:
    """Beside vLLM's own; of several processes that answer HTTP the newest value counts."""
    version = Gauge(VERSION, "Version that drafts.", ["domain"], multiprocess_mode="mostrecent")
    return version, Counter("osd_draft_rejected", "Versions that could not be loaded.", ["domain"])
