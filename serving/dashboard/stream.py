"""What the dashboard follows: every second what has changed since the event before."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from serving.http import sse
from serving.http.errors import ApiError
from serving.metrics.history import Bins
from serving.service import Watched

MOST_VIEWERS = 64
"""Streams of one replica at the same time."""

STREAM_SECONDS = 20.0
"""After which a stream ends and the page connects again: a replica that is told to stop waits for it."""

_PERIOD = 1.0
_PHASE = 0.4  # of a second; by then the replicas have told what they counted in the one before
_RETRY_MS = 500
_ID = re.compile(r"(\d{2,4})-(\d{1,12})", re.ASCII)

_Asked = tuple[int, int | None]


class Viewers:
    """The streams of one replica, which share what is read for them; only used on its event loop.

    An event is JSON: the ``time``, ``bins`` as ``serving.metrics.history.Bins`` has them, and of the state, in parts,
    what differs from the event before. Its id is the window and the last bin, from which a later stream goes on.
    """

    def __init__(self, service: Watched) -> None:
        self._service = service
        self._open = 0
        self._read_at = 0.0
        self._state: asyncio.Task[dict[str, bytes]] | None = None
        self._bins: dict[_Asked, asyncio.Task[Bins]] = {}

    def enter(self) -> None:
        """Be one more.

        Raises:
            ApiError: 429; there is none.
        """
        if self._open >= MOST_VIEWERS:
            message = f"{self._open} pages follow this replica already, as many as it serves."
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "5"})
        self._open += 1

    def leave(self) -> None:
        """Be one less."""
        self._open -= 1

    async def follow(self, seconds: int, last: str | None) -> AsyncIterator[bytes]:
        """Events of the window of so many ``seconds``: those after the one with the id ``last``, if it is of it."""
        since, sent = _since(seconds, last), dict[str, bytes]()
        end = time.monotonic() + STREAM_SECONDS
        yield sse.retry(_RETRY_MS)
        while True:
            self._renew()
            bins, state = await self._bins_of(seconds, since), await self._parts()
            changed = {name: part for name, part in state.items() if sent.get(name) != part}
            kind = "snapshot" if since is None else "update"
            since, sent = bins.time[-1] if bins.time else since, state
            yield sse.named(kind, f"{seconds}-{since or 0}", _encoded(bins, changed))
            if time.monotonic() >= end:
                return
            await asyncio.sleep(_PERIOD - (time.time() - _PHASE) % _PERIOD)

    def _renew(self) -> None:
        """Read anew what was read before this second."""
        now = time.time() - _PHASE
        if int(now) != int(self._read_at):
            self._read_at, self._state, self._bins = now, None, {}

    async def _parts(self) -> dict[str, bytes]:
        if self._state is None:
            self._state = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._state)

    async def _bins_of(self, seconds: int, since: int | None) -> Bins:
        asked = seconds, since
        if asked not in self._bins:
            self._bins[asked] = asyncio.ensure_future(self._service.dashboard_bins(seconds, since))
        return await asyncio.shield(self._bins[asked])

    async def _read(self) -> dict[str, bytes]:
        return {
            name: msgspec.json.encode(part) for name, part in parts_of(await self._service.dashboard_state()).items()
        }


def parts_of(state: dict[str, Any]) -> dict[str, Any]:
    """What changes together of the state: the time is left out, and so is what training steps tell beside figures."""
    parts = {name: part for name, part in state.items() if name not in ("time", "events")}
    told = state["events"]
    parts["events"] = [event for event in told if event["kind"] not in ("train_step", "fund")]
    parts["steps"] = [
        [event["time"], event.get("loss"), event.get("cpu_seconds")] for event in told if event["kind"] == "train_step"
    ]
    parts["funds"] = [
        [event["time"], *(event.get(name) for name in ("fund", "needed", "cost", "saved", "certain"))]
        for event in told
        if event["kind"] == "fund"
    ]
    return parts


def _since(seconds: int, last: str | None) -> int | None:
    """The last bin that a page has, None where it has none of this window, or a clock was set back since."""
    found = _ID.fullmatch(last or "")
    if found is None or int(found[1]) != seconds or not 0 < int(found[2]) <= time.time():
        return None
    return int(found[2])


def _encoded(bins: Bins, changed: dict[str, bytes]) -> bytes:
    state = b",".join(b'"%b":%b' % (name.encode(), part) for name, part in changed.items())
    return b'{"time":%.3f,"bins":%b,"state":{%b}}' % (time.time(), msgspec.json.encode(bins), state)
