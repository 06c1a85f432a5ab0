"""Middleware of vLLM (``--middleware``) that loads new drafter versions, and captures traces if it is asked to.

It needs the worker extension ``osd.vllm.worker.Osd``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from osd.vllm.consent import Message, Receive, carry, observed
from osd.vllm.rollout import Follower
from osd.vllm.settings import CAPTURE, SettingsError, VllmSettings

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only

Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
_Part = Callable[[], Coroutine[Any, Any, None]]
PRIVATE = "osd_private"
"""Key in the state of a scope; true for a request that is not captured even if its body permits it."""


class OsdMiddleware:
    """ASGI middleware that forwards all requests unchanged.

    During the lifespan of the server it keeps the draft model at the version of the rollout pointer. With
    ``OSD_VLLM_CAPTURE=1`` it starts the capture in the workers, and tells them which requests may be captured. A wrong
    setting is logged in one sentence, and the server runs without the parts that need it.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._default: bool | None = None  # consent of requests without ``store``; None without capture

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] == "lifespan":
            return await self._serve(scope, receive, send)
        if scope["type"] == "http" and self._default is not None and not scope.get("state", {}).get(PRIVATE):
            receive = observed(scope["path"], receive, self._default)
        await self._app(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        parts = await self._start(scope["app"].state.engine_client)
        tasks = [asyncio.ensure_future(part()) for part in parts]
        try:
            await self._app(scope, receive, send)
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _start(self, engine: Any) -> list[_Part]:
        """Return the parts that run with the server; log the reason if one does not start."""
        try:
            settings = VllmSettings.from_environment()
            parts: list[_Part] = [Follower(engine, settings).follow]
        except SettingsError as error:
            log.error("drafter versions are not updated and nothing is captured: %s", error)
            return []
        return parts + await self._start_capture(engine, settings) if settings.capture else parts

    async def _start_capture(self, engine: Any, settings: VllmSettings) -> list[_Part]:
        """Start to capture, and return the parts that run with it; log the reason if it does not start."""
        try:  # following the pointer needs none of them
            from osd.config import ConfigError, load_settings
            from osd.vllm.capture_control import CaptureControl
            from osd.vllm.reporting import Reporting
        except ImportError as error:
            log.error("capture is off: %s needs the packages of osd-llm[vllm]: %s", CAPTURE, error)
            return []
        control = CaptureControl(engine)
        try:
            reporting = Reporting(engine, settings)
        except SettingsError as error:
            log.error("capture is off: %s", error)
            return []
        try:
            default = load_settings().serving.capture_default
            carry(engine)
            if not await control.start():
                return [reporting.run]  # canaries are then judged by the counters that it reports
        except (ConfigError, ValueError) as error:
            log.error("capture is off: %s", error)
            return [reporting.run]
        self._default = default
        return [control.run, reporting.run]
