"""Replicas that recall learn what the others decoded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from osd.capture.retention import belongs, oldest_allowed
from osd.capture.tail import TraceTail
from osd.capture.trace import Trace, TraceError
from osd.config import Settings
from osd.drafters.recall.rehearsal import rehearse
from osd.learning.batch import check, length
from osd.recall.backends import backend
from osd.recall.memory import Memory
from osd.target.identity import Identity

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.001
_TURN_SECONDS = 1.0


class RecallListener:
    """Puts what other replicas decoded into this one's tables, for one thread.

    It pauses every few tokens, so that the engine, which shares an interpreter with it, is never held up.
    """

    def __init__(
        self, settings: Settings, redis_url: str, name: str, target: Identity, vocabulary: int, stop: threading.Event
    ) -> None:
        """Listen for the replica ``name``, whose ``target`` has ``vocabulary`` ids, until ``stop``."""
        self._settings, self._target, self._vocabulary, self._stop = settings, target, vocabulary, stop
        self._tail = TraceTail(redis_url, settings.recalled, name)
        self._text = backend().text(settings.engine.context)

    def listen(self, tables: Mapping[str, Memory], purged: Iterable[str]) -> bool:
        """Learn what came since the last call, by the table of each domain; whether there was anything.

        It takes about a second at most, and leaves the rest for the next call. ``purged`` requests are left out.
        """
        learnt, end = False, time.monotonic() + _TURN_SECONDS
        for trace in self._tail.new(tables):
            if trace.domain in tables and self._usable(trace, purged):
                learnt = True
                for _ in rehearse(tables[trace.domain], self._text, trace):
                    if self._stop.wait(_PAUSE_SECONDS):
                        return learnt
            if time.monotonic() > end:
                break
        return learnt

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()

    def _usable(self, trace: Trace, purged: Iterable[str]) -> bool:
        oldest = oldest_allowed(self._settings.capture, time.time())
        if oldest is not None and trace.created < oldest:
            return False
        if any(belongs(trace.request_id, request) for request in purged):
            return False
        target, context = self._target, self._settings.engine.context
        try:
            if not target.wrote(trace.target):
                raise TraceError(f"it is of the target {trace.target}, not of {target.label}")
            if length(trace) > context:
                raise TraceError(f"it has {length(trace)} tokens, and engine.context is {context}")
            check(trace, self._vocabulary, 0)
            if trace.target_ids.numpy().min() < 0:
                raise TraceError("target_ids has an id below 0")
        except TraceError as error:
            logger.warning("what another replica decoded is not learnt: %s", error)
            return False
        return True
