"""The parts of the replay buffer: the newest records of each domain, and a sample of all there ever were."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import NamedTuple

from osd.capture.trace import Trace
from osd.hashing import unit_hash
from osd.learning.batch import length

Key = tuple[str, int]
"""A record: (request_id, segment)."""


def key_of(trace: Trace) -> Key:
    """The key of a trace."""
    return trace.request_id, trace.segment


class Size(NamedTuple):
    """How much records are, or may be: their tokens, and the bytes of their arrays."""

    tokens: int
    bytes: float

    def plus(self, trace: Trace, sign: int = 1) -> Size:
        """With a record more, or one less."""
        return Size(self.tokens + sign * length(trace), self.bytes + sign * trace.nbytes)

    def fits(self, room: Size) -> bool:
        """Whether there is room for so much."""
        return self.tokens <= room.tokens and self.bytes <= room.bytes


class RecentBuffer:
    """The newest ``records`` by key, oldest first, up to ``room``; their ``size``, and their tokens ``by_domain``."""

    def __init__(self, room: Size) -> None:
        self.records: OrderedDict[Key, Trace] = OrderedDict()
        self.size = Size(0, 0)
        self._room = room
        self.by_domain: Counter[str] = Counter()

    def add(self, trace: Trace) -> list[Key]:
        """Add a record and return those that had to leave for it.

        The oldest record of the domain with the most tokens leaves first. The newest stays even when it alone is
        larger than the room.
        """
        self.records[key_of(trace)] = trace
        self._count(trace, 1)
        return self._fit()

    def resize(self, room: Size) -> list[Key]:
        """Keep records up to this ``room`` from now on; returns those that had to leave, as ``add`` does."""
        self._room = room
        return self._fit()

    def discard(self, keys: list[Key]) -> None:
        """Remove these records as far as they are here."""
        for key in self.records.keys() & set(keys):
            self._remove(key)

    def _fit(self) -> list[Key]:
        left: list[Key] = []
        while not self.size.fits(self._room) and len(self.records) > 1:
            newest = next(reversed(self.records))
            largest = max(self.by_domain, key=lambda domain: self.by_domain[domain])
            oldest = next((key for key, one in self.records.items() if one.domain == largest and key != newest), None)
            # Only the newest is left of the largest domain: the others give way to it.
            gone = oldest or next(key for key in self.records if key != newest)
            self._remove(gone)
            left.append(gone)
        return left

    def _remove(self, key: Key) -> None:
        self._count(self.records.pop(key), -1)

    def _count(self, trace: Trace, sign: int) -> None:
        self.size = self.size.plus(trace, sign)
        self.by_domain[trace.domain] += sign * length(trace)
        if not self.by_domain[trace.domain]:
            del self.by_domain[trace.domain]


class UniformSample:
    """A uniform sample, without replacement, of every record that was ever offered, up to ``room``.

    Kept are the records with the smallest hash of their key: no matter in which order they come, how often, or in
    which process, the same are kept. One that stands for several of the traffic has the smallest of as many hashes, so
    that the sample is one of the traffic (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
    """

    def __init__(self, room: Size) -> None:
        self.records: dict[Key, Trace] = {}
        self._room = room
        self._size = Size(0, 0)
        self._heap: list[tuple[float, Key]] = []  # the largest hash first

    def offer(self, trace: Trace) -> None:
        """Keep the record if it belongs to the sample; others leave for it."""
        key = key_of(trace)
        if not Size(0, 0).plus(trace).fits(self._room):
            return
        self.records[key] = trace
        self._size = self._size.plus(trace)
        drawn = unit_hash(f"{key[0]} {key[1]}".encode(), b"anchor")
        heapq.heappush(self._heap, ((1 - drawn) ** (1 / trace.weight) - 1, key))
        self.resize(self._room)

    def resize(self, room: Size) -> None:
        """Keep records up to this ``room`` from now on; what left for a smaller one does not come back."""
        self._room = room
        while not self._size.fits(room):
            _, gone = heapq.heappop(self._heap)
            self._size = self._size.plus(self.records.pop(gone), -1)

    def discard(self, keys: list[Key]) -> None:
        """Remove these records as far as they are here."""
        for key in self.records.keys() & set(keys):
            self._size = self._size.plus(self.records.pop(key), -1)
        self._heap = [entry for entry in self._heap if entry[1] in self.records]
        heapq.heapify(self._heap)
