"""Records that wait for Redis: a queue that is bounded in records and in bytes, and never blocks whoever fills it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, Protocol, TypeVar


class ClosedError(Exception):
    """Nothing is taken any more."""


class Record(Protocol):
    """Something that is put on the stream of its domain."""

    @property
    def domain(self) -> str:
        """Whose it is."""
        ...

    @property
    def created(self) -> float:
        """When it was made, in seconds since the epoch."""
        ...

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        ...


Kind = TypeVar("Kind", bound=Record)


class Backlog(Generic[Kind]):
    """The newest records, oldest first; any thread may ask.

    Where there are more than ``records``, or more than ``most_bytes`` in all, the oldest leave. The newest stays even
    when it alone is larger.
    """

    def __init__(self, records: int, most_bytes: int) -> None:
        self._most, self._most_bytes = records, most_bytes
        self._waiting: deque[Kind] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def finished(self) -> bool:
        """Whether it is closed and nothing waits any more."""
        with self._changed:
            return self._closed and not self._waiting

    def put(self, record: Kind) -> int:
        """Add a record; returns how many older ones had to leave.

        Raises:
            ClosedError: it takes no more.
        """
        gone = 0
        with self._changed:
            if self._closed:
                raise ClosedError
            self._waiting.append(record)
            self._bytes += record.nbytes
            while len(self._waiting) > 1 and (len(self._waiting) > self._most or self._bytes > self._most_bytes):
                self._leave()
                gone += 1
            self._changed.notify()
        return gone

    def take(self, timeout: float) -> Kind | None:
        """The oldest record, which leaves; None when none came within ``timeout`` seconds, or it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout)
            return self._leave() if self._waiting else None

    def close(self) -> None:
        """Take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def clear(self) -> int:
        """Let all go; returns how many there were."""
        with self._changed:
            gone = len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return gone

    def _leave(self) -> Kind:
        record = self._waiting.popleft()
        self._bytes -= record.nbytes
        return record
