"""Updates of vLLM's draft model to the drafter version of the rollout pointer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from prometheus_client import Counter, Gauge

from osd.registry.pointer_file import Rollout
from osd.vllm.published import PublishedDrafter
from osd.vllm.repetition import repeat
from osd.vllm.settings import VllmSettings, tries_canaries

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only

VERSION = "osd_draft_version"
"""Metric with the number of the loaded drafter version."""

_PERIOD, _POLL_SECONDS, _READ_SECONDS, _REFUSED_SECONDS = 1.0, 0.05, 120.0, 60.0


class Follower:
    """Loop that compares the loaded version with the pointer once a second.

    The version is the canary if there is a canary and this server tries canaries now, otherwise the stable version.
    """

    def __init__(self, engine: Any, settings: VllmSettings) -> None:
        """Follow the pointer for ``engine``, vLLM's client of its engine.

        Raises:
            SettingsError: there is no registry or no exported drafter.
        """
        self._engine = engine
        speculative = engine.vllm_config.speculative_config
        self._published = PublishedDrafter(settings, None if speculative is None else speculative.model)
        self._loaded = self._published.started
        self._refused: dict[int, float] = {}  # refused versions, and the time of the next attempt
        self._version, self._rejected = _metrics()
        self._version.labels(self._published.domain).set(self._loaded)

    async def follow(self) -> None:
        """Run until the task is cancelled."""
        await repeat(self._update, _PERIOD, "draft weights are not updated")

    async def _update(self) -> None:
        rollout = await asyncio.to_thread(self._published.rollout)
        wanted = self._loaded if rollout is None else self._wanted(rollout)
        if wanted == self._loaded or self._is_refused(wanted):
            return
        if problems := await self._read(wanted):
            self._refused[wanted] = time.monotonic() + _REFUSED_SECONDS
            self._rejected.labels(self._published.domain).inc()
            log.error("version %d is not loaded, version %d stays: %s", wanted, self._loaded, problems[0])
            return
        hashes = set(await self._engine.collective_rpc("osd_load_draft", args=(wanted,)))
        self._loaded = wanted
        self._version.labels(self._published.domain).set(wanted)
        log.info("loaded version %d of %s, sha256 %s", wanted, self._published.domain, ", ".join(hashes))

    def _wanted(self, rollout: Rollout) -> int:
        canary = rollout.canary
        return canary if canary is not None and tries_canaries() and not self._is_refused(canary) else rollout.stable

    def _is_refused(self, number: int) -> bool:
        return time.monotonic() < self._refused.get(number, 0.0)

    async def _read(self, number: int) -> list[str]:
        """Let every worker read a version, and return the problems.

        Raises:
            TimeoutError: reading takes longer than two minutes.
        """
        await self._engine.collective_rpc("osd_read_draft", args=(number,))
        async with asyncio.timeout(_READ_SECONDS):
            while None in (problems := await self._engine.collective_rpc("osd_draft_read", args=(number,))):
                await asyncio.sleep(_POLL_SECONDS)
        return [problem for problem in problems if problem]


def _metrics() -> tuple[Gauge, Counter]:
    """Return the metrics; with several HTTP processes, the most recent value of the version counts."""
    version = Gauge(VERSION, "Loaded drafter version.", ["domain"], multiprocess_mode="mostrecent")
    return version, Counter("osd_draft_rejected", "Drafter versions that could not be loaded.", ["domain"])
