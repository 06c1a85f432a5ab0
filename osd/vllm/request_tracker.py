"""Assignment of the rows of a vLLM batch to requests.

vLLM passes rows of token ids to a proposer. Requests can move to other rows, and vLLM does not pass their ids.
"""

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
    """Return the smallest number of bytes for the texts of ``most`` requests."""
    return most * text_bytes(LEAST_ROOM)


@dataclass(eq=False)
class TrackedRequest:
    """Request with its text.

    Attributes:
        number: unique number of the request.
        text: tokens of its row from ``start`` to ``end``.
        room: capacity of ``text`` in tokens.
        start: position of the first token in ``text``.
        end: position after the last token in ``text``.
        seen: number of the last call in which the request had a row.
    """

    number: int
    text: Text
    room: int
    start: int = 0
    end: int = 0
    seen: int = 0


class RequestTracker:
    """Running requests, at most ``most``; their texts have at most ``budget`` bytes together.

    vLLM calls the proposer once per batch. In each call ``begin`` comes first, then ``of`` for each row. A row belongs
    to the request whose text equals the tokens of the row before its new tokens; the previous request of the row is
    tried first. A row without a match is a new request. A request without a row in 64 calls has ended. If all places
    are taken, the request that was not seen for longest ends. A text that outgrows its room keeps its last half.
    """

    def __init__(self, backend: Backend, most: int, budget: int) -> None:
        self._backend, self._most, self._budget = backend, most, budget
        self._rows: dict[int, TrackedRequest] = {}
        self._all: list[TrackedRequest] = []
        self._call = self._opened = self._used = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def bytes_used(self) -> int:
        """Number of bytes of all texts."""
        return self._used

    def begin(self) -> None:
        """Start the call for a batch, in which each request has at most one row; remove requests that have ended."""
        self._call += 1
        if self._call % _PATIENCE == 0:
            for request in [request for request in self._all if request.seen <= self._call - _PATIENCE]:
                self._close(request)

    def of(self, index: int, row: NDArray[np.int32], before: int, new: int) -> TrackedRequest:
        """Return the request of a row, tracked before or new; the caller appends the new tokens to its text.

        Args:
            index: index of the row in the batch.
            row: token ids of the row.
            before: number of tokens before the new tokens.
            new: number of new tokens.
        """
        request = self._rows.get(index)
        if request is None or not self._matches(request, row, before):
            request = next((other for other in self._all if self._matches(other, row, before)), None)
        if request is None:
            request = self._open(row, before, before + new)
        elif before + new - request.start > request.room:
            self._read(request, row, before, before + new - request.start)
        request.seen, self._rows[index] = self._call, request
        return request

    def _matches(self, request: TrackedRequest, row: NDArray[np.int32], before: int) -> bool:
        is_free = request.end == before and request.seen != self._call
        return is_free and request.text.equals(row[request.start : before])

    def _open(self, row: NDArray[np.int32], before: int, tokens: int) -> TrackedRequest:
        if len(self._all) == self._most:
            self._close(min(self._all, key=lambda request: request.seen))
        self._opened += 1
        request = TrackedRequest(self._opened, self._backend.text(LEAST_ROOM), LEAST_ROOM)
        self._used += text_bytes(LEAST_ROOM)
        self._all.append(request)
        self._read(request, row, before, tokens)
        return request

    def _read(self, request: TrackedRequest, row: NDArray[np.int32], before: int, tokens: int) -> None:
        """Read a row again from its start, with room for ``tokens`` tokens if the budget allows it."""
        reserved = (self._most - len(self._all)) * text_bytes(LEAST_ROOM)
        left = self._budget - self._used - reserved + text_bytes(request.room)
        room = LEAST_ROOM
        while room < min(tokens, _MOST_ROOM) and text_bytes(2 * room) <= left:
            room *= 2
        if room > request.room:
            self._used += text_bytes(room) - text_bytes(request.room)
            request.text, request.room = self._backend.text(room), room
        else:
            request.text.clear()
        if tokens > request.room:
            request.start = max(before - request.room // 2, request.start)
        request.end = before
        request.text.append(row[request.start : before].tolist(), certain=True)

    def _close(self, request: TrackedRequest) -> None:
        self._all.remove(request)
        self._used -= text_bytes(request.room)
        self._rows = {index: tracked for index, tracked in self._rows.items() if tracked is not request}
