"""Event stream of the dashboard: once per second the changes since the previous event."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from serving.http import sse
from serving.http.errors import ApiError
from serving.metrics.history import Bins

if TYPE_CHECKING:
    from serving.monitored import Monitored  # imports serving.dashboard

MAX_VIEWERS = 64
"""Largest number of concurrent streams of one replica."""

STREAM_SECONDS = 20.0
"""Seconds until a stream ends and the page connects again; a replica that shuts down waits for its streams."""

_PERIOD = 1.0
_PHASE = 0.4  # offset within a second, at which the replicas have reported the previous second
_RETRY_MS = 500
_ID = re.compile(r"(\d{2,4})-(\d{1,12})", re.ASCII)

_BinsKey = tuple[int, int | None]
"""Window in seconds, and the start of the last bin that the page has."""


class Viewers:
    """Streams of one replica, which share the data that they read; use it on the event loop only.

    An event is JSON with the ``time``, the ``bins`` of ``serving.metrics.history.Bins``, and the parts of the ``state``
    that differ from the previous event. Its id holds the window and the last bin, so that a later stream can continue.
    """

    def __init__(self, service: Monitored) -> None:
        self._service = service
        self._open = 0
        self._read_at = 0.0
        self._state: asyncio.Task[dict[str, bytes]] | None = None
        self._bins: dict[_BinsKey, asyncio.Task[Bins]] = {}

    def enter(self) -> None:
        """Count a new stream.

        Raises:
            ApiError: 429; ``MAX_VIEWERS`` streams are open.
        """
        if self._open >= MAX_VIEWERS:
            message = f"This replica serves {self._open} open dashboards, which is its limit. Try again."
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "5"})
        self._open += 1

    def leave(self) -> None:
        """Count the end of a stream."""
        self._open -= 1

    async def follow(self, seconds: int, last: str | None) -> AsyncIterator[bytes]:
        """Yield the events of a stream.

        Args:
            seconds: length of the window.
            last: id of the last event that the page has. If it is valid for this window, only later bins are sent.
        """
        since, sent = _since(seconds, last), dict[str, bytes]()
        end = time.monotonic() + STREAM_SECONDS
        yield sse.retry(_RETRY_MS)
        while True:
            self._expire_cache()
            bins, state = await self._read_bins(seconds, since), await self._parts()
            changed = {name: part for name, part in state.items() if sent.get(name) != part}
            kind = "snapshot" if since is None else "update"
            since, sent = bins.time[-1] if bins.time else since, state
            yield sse.named(kind, f"{seconds}-{since or 0}", _encoded(bins, changed))
            if time.monotonic() >= end:
                return
            await asyncio.sleep(_PERIOD - (time.time() - _PHASE) % _PERIOD)

    def _expire_cache(self) -> None:
        """Discard the data that was read before the current second."""
        now = time.time() - _PHASE
        if int(now) != int(self._read_at):
            self._read_at, self._state, self._bins = now, None, {}

    async def _parts(self) -> dict[str, bytes]:
        if self._state is None:
            self._state = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._state)

    async def _read_bins(self, seconds: int, since: int | None) -> Bins:
        key = seconds, since
        if key not in self._bins:
            self._bins[key] = asyncio.ensure_future(self._service.dashboard_bins(seconds, since))
        return await asyncio.shield(self._bins[key])

    async def _read(self) -> dict[str, bytes]:
        return {
            name: msgspec.json.encode(part) for name, part in parts_of(await self._service.dashboard_state()).items()
        }


def parts_of(state: dict[str, Any]) -> dict[str, Any]:
    """Split the dashboard's state into parts that change together, without the time.

    Events of training steps and funds become rows of numbers in the parts ``steps`` and ``funds``.
    """
    parts = {name: part for name, part in state.items() if name not in ("time", "events")}
    events = state["events"]
    parts["events"] = [event for event in events if event["kind"] not in ("train_step", "fund")]
    parts["steps"] = [
        [event["time"], event.get("loss"), event.get("cpu_seconds")]
        for event in events
        if event["kind"] == "train_step"
    ]
    parts["funds"] = [
        [event["time"], *(event.get(name) for name in ("fund", "needed", "cost", "saved", "certain"))]
        for event in events
        if event["kind"] == "fund"
    ]
    return parts


def _since(seconds: int, last: str | None) -> int | None:
    """Return the last bin that a page has; None if its window differs or a clock was set back."""
    match = _ID.fullmatch(last or "")
    if match is None or int(match[1]) != seconds or not 0 < int(match[2]) <= time.time():
        return None
    return int(match[2])


def _encoded(bins: Bins, changed: dict[str, bytes]) -> bytes:
    state = b",".join(b'"%b":%b' % (name.encode(), part) for name, part in changed.items())
    return b'{"time":%.3f,"bins":%b,"state":{%b}}' % (time.time(), msgspec.json.encode(bins), state)
