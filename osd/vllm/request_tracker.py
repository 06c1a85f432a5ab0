"""Who stands in which row: vLLM gives a proposer rows of token ids, which move, and no names of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osd.recall.backends import text_bytes
from osd.recall.memory import Backend, Text

LEAST_ROOM = 256
_MOST_ROOM = 1 << 14
_PATIENCE = 64


def least_bytes(most: int) -> int:
    """What the texts of ``most`` requests need at least."""
    return most * text_bytes(LEAST_ROOM)


@dataclass(eq=False)
class Reader:
    """A request: ``text`` has room for ``room`` tokens and holds those of its row from ``start`` to ``end``.

    It was last seen in the call ``seen``; ``number`` is never given again.
    """

    number: int
    text: Text
    room: int
    start: int = 0
    end: int = 0
    seen: int = 0


class Readers:
    """The requests that run, at most ``most``, with texts of at most ``budget`` bytes.

    A row is the request whose text is all that the row held before its new tokens: first the one that stood there, then
    any other. A row that nobody knows is a new request. A request that was in no row for 64 calls has ended; where all
    places are taken, the one that was not seen for longest has. A text for which there is no more room goes on with its
    last half.
    """

    def __init__(self, backend: Backend, most: int, budget: int) -> None:
        self._backend, self._most, self._budget = backend, most, budget
        self._rows: dict[int, Reader] = {}
        self._all: list[Reader] = []
        self._call = self._opened = self._used = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def bytes_used(self) -> int:
        """Those of all texts."""
        return self._used

    def begin(self) -> None:
        """A call begins, in which each request is in one row at most."""
        self._call += 1
        if self._call % _PATIENCE == 0:
            for reader in [one for one in self._all if one.seen <= self._call - _PATIENCE]:
                self._close(reader)

    def of(self, place: int, row: NDArray[np.int32], before: int, new: int) -> Reader:
        """The request in the row ``place`` of ``before`` tokens and ``new`` ones, which its text lacks."""
        reader = self._rows.get(place)
        if reader is None or not self._stands(reader, row, before):
            reader = next((one for one in self._all if self._stands(one, row, before)), None)
        if reader is None:
            reader = self._open(row, before, before + new)
        elif before + new - reader.start > reader.room:
            self._read(reader, row, before, before + new - reader.start)
        reader.seen, self._rows[place] = self._call, reader
        return reader

    def _stands(self, reader: Reader, row: NDArray[np.int32], before: int) -> bool:
        fits = reader.end == before and reader.seen != self._call
        return fits and reader.text.equals(row[reader.start : before])

    def _open(self, row: NDArray[np.int32], before: int, tokens: int) -> Reader:
        if len(self._all) == self._most:
            self._close(min(self._all, key=lambda one: one.seen))
        self._opened += 1
        reader = Reader(self._opened, self._backend.text(LEAST_ROOM), LEAST_ROOM)
        self._used += text_bytes(LEAST_ROOM)
        self._all.append(reader)
        self._read(reader, row, before, tokens)
        return reader

    def _read(self, reader: Reader, row: NDArray[np.int32], before: int, tokens: int) -> None:
        """Read a row anew, from where it began, with as much room as ``tokens`` need, or as there is."""
        reserved = (self._most - len(self._all)) * text_bytes(LEAST_ROOM)
        left = self._budget - self._used - reserved + text_bytes(reader.room)
        room = LEAST_ROOM
        while room < min(tokens, _MOST_ROOM) and text_bytes(2 * room) <= left:
            room *= 2
        if room > reader.room:
            self._used += text_bytes(room) - text_bytes(reader.room)
            reader.text, reader.room = self._backend.text(room), room
        else:
            reader.text.clear()
        if tokens > reader.room:
            reader.start = max(before - reader.room // 2, reader.start)
        reader.end = before
        reader.text.append(row[reader.start : before].tolist(), certain=True)

    def _close(self, reader: Reader) -> None:
        self._all.remove(reader)
        self._used -= text_bytes(reader.room)
        self._rows = {place: one for place, one in self._rows.items() if one is not reader}
