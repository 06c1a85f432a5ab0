"""Queue of records that wait for Redis, bounded in records and bytes; adding a record never blocks."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from osd.capture.exchange import Exchange
from osd.capture.trace import Trace


class ClosedError(Exception):
    """Attempt to add a record to a closed queue."""


Kind = TypeVar("Kind", bound=Trace | Exchange)


class Backlog(Generic[Kind]):
    """Bounded queue of the newest records, in order of arrival; all methods are thread-safe.

    Above ``max_records`` records or ``max_bytes`` bytes the oldest records are dropped. The newest record stays even if
    it is larger than ``max_bytes``.
    """

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._waiting: deque[Kind] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def finished(self) -> bool:
        """Whether the queue is closed and empty."""
        with self._changed:
            return self._closed and not self._waiting

    def put(self, record: Kind) -> int:
        """Add a record and return the number of older records that were dropped.

        Raises:
            ClosedError: the queue is closed.
        """
        dropped = 0
        with self._changed:
            if self._closed:
                raise ClosedError
            self._waiting.append(record)
            self._bytes += record.nbytes
            while len(self._waiting) > 1 and (len(self._waiting) > self._max_records or self._bytes > self._max_bytes):
                self._pop()
                dropped += 1
            self._changed.notify()
        return dropped

    def take(self, timeout: float) -> Kind | None:
        """Remove and return the oldest record; return None after ``timeout`` seconds, or when the queue is finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout)
            return self._pop() if self._waiting else None

    def close(self) -> None:
        """Accept no more records."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def clear(self) -> int:
        """Drop all records and return their number."""
        with self._changed:
            dropped = len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return dropped

    def _pop(self) -> Kind:
        record = self._waiting.popleft()
        self._bytes -= record.nbytes
        return record
