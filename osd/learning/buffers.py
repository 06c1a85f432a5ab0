"""Parts of the replay buffer: the newest records of each domain, and a uniform sample of all records ever seen."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import NamedTuple

from osd.capture.trace import Trace
from osd.hashing import unit_hash
from osd.learning.batch import length

Key = tuple[str, int]
"""Key of a record: request id and segment."""


def key_of(trace: Trace) -> Key:
    """Return the request id and the segment number of a trace, which identify the record."""
    return trace.request_id, trace.segment


class Size(NamedTuple):
    """Size of records, or a limit on it: tokens, and bytes of their arrays."""

    tokens: int
    bytes: float

    def plus(self, trace: Trace, sign: int = 1) -> Size:
        """Return the size with one record added, or removed for ``sign`` -1."""
        return Size(self.tokens + sign * length(trace), self.bytes + sign * trace.nbytes)

    def fits(self, limit: Size) -> bool:
        """Return whether neither the tokens nor the bytes exceed a limit."""
        return self.tokens <= limit.tokens and self.bytes <= limit.bytes


class RecentBuffer:
    """Buffer of the newest records, within a limit.

    Attributes:
        records: the records by key, oldest first.
        size: their tokens and bytes.
        by_domain: the number of tokens of each domain.
    """

    def __init__(self, limit: Size) -> None:
        self.records: OrderedDict[Key, Trace] = OrderedDict()
        self.size = Size(0, 0)
        self._limit = limit
        self.by_domain: Counter[str] = Counter()

    def add(self, trace: Trace) -> list[Key]:
        """Add a record with a new key, and return the keys of the evicted records.

        The oldest record of the domain with the most tokens is evicted, again and again until all records fit. The
        added record stays even if it alone exceeds the limit. If it is the only record of that domain, the oldest
        record of all other domains is evicted.
        """
        self.records[key_of(trace)] = trace
        self._count(trace, 1)
        return self._evict()

    def resize(self, limit: Size) -> list[Key]:
        """Set a new limit and return the keys of the evicted records."""
        self._limit = limit
        return self._evict()

    def discard(self, keys: list[Key]) -> None:
        """Remove records; ignore unknown keys."""
        for key in self.records.keys() & set(keys):
            self._remove(key)

    def _evict(self) -> list[Key]:
        evicted: list[Key] = []
        while not self.size.fits(self._limit) and len(self.records) > 1:
            newest = next(reversed(self.records))
            largest = max(self.by_domain, key=lambda domain: self.by_domain[domain])
            key = next((k for k, trace in self.records.items() if trace.domain == largest and k != newest), None)
            if key is None:  # the newest record is the last one of the largest domain: another domain loses a record
                key = next(k for k in self.records if k != newest)
            self._remove(key)
            evicted.append(key)
        return evicted

    def _remove(self, key: Key) -> None:
        self._count(self.records.pop(key), -1)

    def _count(self, trace: Trace, sign: int) -> None:
        self.size = self.size.plus(trace, sign)
        self.by_domain[trace.domain] += sign * length(trace)
        if not self.by_domain[trace.domain]:
            del self.by_domain[trace.domain]


class UniformSample:
    """Uniform sample, without replacement, of all records ever offered, within a limit.

    The sample consists of the records with the smallest hash of their key. So it does not depend on the order or number
    of offers, or on the process. A record of weight w has the distribution of the smallest of w hashes, so that the
    sample represents the traffic (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
    """

    def __init__(self, limit: Size) -> None:
        self.records: dict[Key, Trace] = {}
        self._limit = limit
        self._size = Size(0, 0)
        self._heap: list[tuple[float, Key]] = []  # negated hashes, the largest hash first

    def offer(self, trace: Trace) -> None:
        """Add a record if it belongs to the sample, and remove records that no longer do."""
        key = key_of(trace)
        if not Size(0, 0).plus(trace).fits(self._limit):
            return
        self.records[key] = trace
        self._size = self._size.plus(trace)
        unit = unit_hash(f"{key[0]} {key[1]}".encode(), b"anchor")
        heapq.heappush(self._heap, ((1 - unit) ** (1 / trace.weight) - 1, key))
        self.resize(self._limit)

    def resize(self, limit: Size) -> None:
        """Set a new limit; records that are removed for a smaller limit do not come back."""
        self._limit = limit
        while not self._size.fits(limit):
            _, key = heapq.heappop(self._heap)
            self._size = self._size.plus(self.records.pop(key), -1)

    def discard(self, keys: list[Key]) -> None:
        """Remove records; ignore unknown keys."""
        for key in self.records.keys() & set(keys):
            self._size = self._size.plus(self.records.pop(key), -1)
        self._heap = [entry for entry in self._heap if entry[1] in self.records]
        heapq.heapify(self._heap)
