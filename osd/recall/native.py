"""Recall's memory in C; see ``osd/runtime/native/recall.c``."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from osd.recall.memory import (
    KEPT,
    Allowed,
    ChildDraws,
    Contents,
    DraftNodes,
    DraftQuery,
    Memory,
    Observation,
    Text,
)
from osd.runtime.native import kernels, quick_kernels

_ALLOWED = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int64)


class _DraftRequest(ctypes.Structure):
    """The struct ``DraftRequest`` of ``recall.c``: a sequence to draft for."""

    _fields_ = [
        ("recall", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("limit", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("path", ctypes.c_void_p),
        ("other_ids", ctypes.c_void_p),
        ("other_p", ctypes.c_void_p),
        ("levels", ctypes.c_int64),
        ("ahead", ctypes.POINTER(ctypes.c_int64)),
        ("further", ctypes.c_int64),
        ("allowed", _ALLOWED),
        ("vocabulary", ctypes.c_int64),
    ]


class NativeText:
    """Text of one request in C; see ``osd.recall.memory.Text``."""

    def __init__(self, room: int) -> None:
        """Allocate room for ``room`` tokens.

        Raises:
            MemoryError: the allocation failed.
        """
        self._library: Any = quick_kernels()
        self.address = self._library.osd_text_new(room)
        if not self.address:
            raise MemoryError(f"no memory for a text of {room} tokens")
        weakref.finalize(self, self._library.osd_text_free, self.address)

    def clear(self) -> None:
        """Start a new, empty text."""
        self._library.osd_text_clear(self.address)

    def append(self, tokens: Sequence[int], certain: bool) -> None:
        """Append tokens, and let the table of the request learn them if they are ``certain``."""
        values = array("q", tokens)
        self._library.osd_text_append(self.address, values.buffer_info()[0], len(values), certain)

    def equals(self, tokens: NDArray[np.int32]) -> bool:
        """Return whether the text is ``tokens`` [n], a contiguous array."""
        return bool(self._library.osd_text_is(self.address, tokens.ctypes.data, len(tokens)))


class NativeMemory:
    """Shared table in C; see ``osd.recall.memory.Memory``."""

    def __init__(self, entries: int) -> None:
        """Allocate a table of ``entries`` entries.

        Raises:
            MemoryError: the allocation failed.
        """
        self._quick: Any = quick_kernels()
        self._library: Any = kernels()
        self.address = self._quick.osd_recall_new(entries)
        if not self.address:
            raise MemoryError(f"no memory for a table of {entries} entries")
        self.entries = max(entries // 8, 1) * 8
        weakref.finalize(self, self._quick.osd_recall_free, self.address)

    def learn(self, text: Text, observation: Observation, temperature: float, reader: int | None, now: int) -> None:
        """Learn the distributions of a decoding step in one call of the library."""
        tokens, parents = array("q", observation.tokens), array("q", observation.parents)
        following = array("q", observation.following)
        ids, p = (None, None) if observation.proposals is None else (part.data_ptr() for part in observation.proposals)
        self._quick.osd_recall_learn(
            self.address, _address(text), len(tokens), tokens.buffer_info()[0], parents.buffer_info()[0],
            observation.ids.data_ptr(), observation.logp.data_ptr(), observation.ids.shape[1],
            following.buffer_info()[0], ids, p, _scale(temperature), reader is not None, reader or 0, now,
        )  # fmt: skip

    def learn_tokens(self, text: Text, tokens: NDArray[np.int32], drafted: bool, now: int) -> None:
        """Learn ``tokens`` as certain continuations of ``text``, and append them."""
        self._quick.osd_recall_learn_tokens(self.address, _address(text), tokens.ctypes.data, len(tokens), drafted, now)

    def predict(self, text: Text, most: int) -> tuple[list[int], list[float]]:
        """Return up to ``most`` tokens that may follow ``text``, in descending order, and their probabilities."""
        ids, q = array("q", [0] * most), array("f", [0.0] * most)
        count = self._quick.osd_recall_predict(
            self.address, _address(text), most, ids.buffer_info()[0], q.buffer_info()[0]
        )
        return ids.tolist()[:count], q.tolist()[:count]

    def drop(self, before: int = 0, reader: int = 0) -> int:
        """Remove entries last learnt before a time, and those of the request ``reader``; return their number."""
        return self._library.osd_recall_drop(self.address, before, reader)

    def used(self) -> int:
        """Return the number of entries in use."""
        return self._library.osd_recall_used(self.address)

    def contents(self) -> Contents:
        """Return a copy of the whole table."""
        places, each = 8, self._quick.osd_recall_entry_bytes()
        sizes = self.entries * places, self.entries * (each - places), self._quick.osd_recall_weight_bytes()
        parts = Contents(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
        self._copy(parts, out=True)
        return parts

    def load(self, contents: Contents) -> None:
        """Replace the entries by those of a table of the same size."""
        self._copy(contents, out=False)

    def _copy(self, parts: Contents, out: bool) -> None:
        addresses = (part.data_ptr() for part in (parts.places, parts.entries, parts.weights))
        self._library.osd_recall_copy(self.address, *addresses, out)


def _address(of: Text | Memory) -> int:
    """Return the address of the C struct behind a text or a memory."""
    return cast("NativeText | NativeMemory", of).address


def _scale(temperature: float) -> float:
    """Return 1 / temperature, 0 for greedy."""
    return 1 / temperature if temperature > 0 else 0.0


class NativeDrafting:
    """Drafter over the memories of several sequences; its buffers serve a single thread."""

    def __init__(self) -> None:
        self._library: Any = quick_kernels()
        self._room = 0
        self._reserve(64)

    def _reserve(self, most: int) -> None:
        if most > self._room:
            self._room = most
            self._integers = [array("q", [0] * most) for _ in range(4)]
            self._chances = array("f", [0.0] * most)

    def draft(self, queries: Sequence[DraftQuery], most: int, floor: float, chains: bool) -> DraftNodes:
        """Draft the most probable nodes of all sequences; raise MemoryError if an allocation fails."""
        self._reserve(most)
        requests = _draft_requests(queries)
        count = self._library.osd_recall_draft(requests, len(queries), most, floor, chains, *self._rooms())
        return self._nodes(count, most)

    def draw(self, queries: Sequence[DraftQuery], most: int, floor: float) -> tuple[DraftNodes, ChildDraws]:
        """Draft nodes whose last children are drawn; raise MemoryError if an allocation fails."""
        self._reserve(most)
        rows = len(queries) + most
        child, ids, q = array("q", [-1] * rows), array("q", [0] * (KEPT * rows)), array("f", [0.0] * (KEPT * rows))
        parts = [part.buffer_info()[0] for part in (child, ids, q)]
        requests = _draft_requests(queries)
        count = self._library.osd_recall_draw(requests, len(queries), most, floor, *self._rooms(), *parts)
        return self._nodes(count, most), ChildDraws(child, ids, q)

    def _rooms(self) -> list[int]:
        return [numbers.buffer_info()[0] for numbers in (*self._integers, self._chances)]

    def _nodes(self, count: int, most: int) -> DraftNodes:
        if count < 0:
            raise MemoryError(f"no memory to draft {most} nodes")
        owners, parents, tokens, levels = (numbers[:count].tolist() for numbers in self._integers)
        return DraftNodes(owners, parents, tokens, levels, self._chances[:count].tolist())


def _draft_requests(queries: Sequence[DraftQuery]) -> ctypes.Array[_DraftRequest]:
    requests = (_DraftRequest * len(queries))()
    for request, sequence in zip(requests, queries, strict=True):
        request.recall, request.text, request.limit = _address(sequence.memory), _address(sequence.text), sequence.limit
        request.seed, request.step, request.scale = sequence.seed, sequence.step, _scale(sequence.temperature)
        if sequence.other is not None:
            request.path, request.levels = sequence.other.path.data_ptr(), len(sequence.other.path)
            request.other_ids, request.other_p = sequence.other.ids.data_ptr(), sequence.other.p.data_ptr()
        if sequence.ahead:
            ahead = sequence.ahead
            request.ahead, request.further = (ctypes.c_int64 * len(ahead))(*ahead), len(ahead)
        if sequence.allowed is not None:
            request.allowed, request.vocabulary = _ALLOWED(partial(_mask_of, sequence.allowed)), sequence.vocabulary
    return requests


def _mask_of(allowed: Allowed, path: Any, length: int) -> int | None:
    """Return the address of the mask of a path, 0 for none; the caller of ``draft`` keeps the array alive."""
    mask = allowed(path[:length])
    return None if mask is None else mask.__array_interface__["data"][0]


class NativeBackend:
    """Factory of the C implementation; see ``osd.recall.memory.Backend``."""

    memory, text, drafting = NativeMemory, NativeText, NativeDrafting
