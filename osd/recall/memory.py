"""Interface of recall: a shared table of the target's distributions, and the text of each running request.

The table maps a context, the last n tokens for n = 1 to 4, to the running mean of the target's distributions after it;
an entry keeps the 8 most probable tokens. Each request has a small table of its own, in which the tokens of its prompt
count as certain. A request also knows where its last five tokens occurred earlier in its text (a copy).

All of these distributions are mixed: a longer context over a shorter one, the request's table over the shared one, a
copy over all. An entry that was learnt c times gets ``c / (c + kappa)`` of the mass. Each kappa is fitted online to the
target's distributions. The chance that the target accepts a token of the mixture is a counted frequency, by the level
that the token came from and its probability in the mixture.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) keeps the target's most probable tokens after single tokens; REST
(He et al. 2023, arXiv 2311.08252) and prompt lookup copy the continuation of the longest match. They are
interpolated as in n-gram language models (Jelinek and Mercer 1980; Witten and Bell 1991).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ORDERS = 4
"""Number of context lengths: 1 to 4 tokens."""
KEPT = 8
"""Tokens that an entry keeps."""
COPY = 2 * ORDERS
"""Level of a copy. Below are 2 (order - 1) for a shared entry, and one more for an entry of the request's own table."""
OTHER = COPY + 1
"""Level of another drafter, mixed over the copy."""
FORCED = OTHER + 1
"""Level of a token that a grammar forces: no other is allowed after the nodes before it."""
SOURCES = ("recall", "request") * ORDERS + ("copy",)
"""Name of a node's source by level."""
OWN_SOURCES = ("request", "copy")
"""Sources of nodes from the request's own text: its prediction, its prompt and its answer so far."""
BEHIND = "forced"
"""Name of the level ``FORCED``."""

Allowed = Callable[[Sequence[int]], NDArray[np.bool_] | None]
"""Function from a path of draft nodes to the mask [vocabulary] of the tokens allowed after it.

It returns None if the path itself is not allowed. The array must not change or move until the draft is made.
"""


@dataclass(frozen=True)
class PathProposals:
    """Proposals of another drafter along its own draft.

    Attributes:
        path: [L], the tokens of its draft.
        ids: [1 + L, 8] int64, its most probable tokens before the first token of the path and after each of them; -1
            for no token.
        p: [1 + L, 8] float32, their probabilities.
    """

    path: Tensor
    ids: Tensor
    p: Tensor


@dataclass(frozen=True)
class Observation:
    """Distributions of the target after the end of a text and after each of the N nodes of a draft on it.

    Attributes:
        tokens: of the nodes.
        parents: of the nodes.
        ids: [1 + N, k] int64, the target's most probable tokens.
        logp: [1 + N, k], their log-probabilities.
        following: [1 + N], the token that the output continues with at this place, -1 where the output does not pass.
        proposals: of another drafter at the same places: ids [1 + N, 8] int64, -1 for no token, and their
            probabilities.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    ids: Tensor
    logp: Tensor
    following: Sequence[int]
    proposals: tuple[Tensor, Tensor] | None = None


class Text(Protocol):
    """Text of one request."""

    def clear(self) -> None:
        """Start a new text."""
        ...

    def append(self, tokens: Sequence[int], certain: bool) -> None:
        """Append tokens; the request's table learns ``certain`` tokens as if their probability was 1."""
        ...

    def equals(self, tokens: NDArray[np.int32]) -> bool:
        """Return whether the text is ``tokens`` [n], a contiguous array."""
        ...


@dataclass(frozen=True)
class DraftQuery:
    """Query for the draft nodes of a sequence.

    Attributes:
        memory: the shared table.
        text: of the request.
        limit: most nodes to draft.
        temperature: 0 for greedy.
        other: proposals of another drafter to mix in.
        seed: of the request's draws, see ``osd.verification.noise``.
        step: number of the decoding step, which keys the draws together with ``seed``.
        ahead: tokens that are certain to come before the first node.
        allowed: constraint on the nodes of ``draft``, None for none.
        vocabulary: length of the constraint's masks.
    """

    memory: Memory
    text: Text
    limit: int
    temperature: float
    other: PathProposals | None = None
    seed: int = 0
    step: int = 0
    ahead: Sequence[int] = ()
    allowed: Allowed | None = None
    vocabulary: int = 0


@dataclass(frozen=True)
class DraftNodes:
    """Draft nodes of several sequences, in descending order of their chances.

    Attributes:
        owners: index of the sequence.
        parents: -1 for the root, else the number of an earlier node of the same sequence.
        tokens: of the nodes.
        levels: the level that each token came from.
        chances: probability that the node is on the path that the target accepts.
    """

    owners: list[int]
    parents: list[int]
    tokens: list[int]
    levels: list[int]
    chances: list[float]

    def kept(self, count: int, sequences: int) -> list[list[float]]:
        """Return for each sequence the chances of its nodes among the first ``count`` nodes, in order."""
        chances: list[list[float]] = [[] for _ in range(sequences)]
        for owner, chance in zip(self.owners[:count], self.chances[:count], strict=True):
            chances[owner].append(chance)
        return chances

    def numbers(self, sequences: int) -> list[list[int]]:
        """Return for each sequence the indices of its nodes, in order."""
        places: list[list[int]] = [[] for _ in range(sequences)]
        for place, owner in enumerate(self.owners):
            places[owner].append(place)
        return places


@dataclass(frozen=True)
class ChildDraws:
    """Distributions that last children were drawn from, one row per root of a sequence and then one per node.

    Attributes:
        child: number of the drawn child within its sequence, -1 if there is none.
        ids: 8 tokens for each row.
        q: their probabilities without the children that were chosen before the draw, 0 where there is no token.
    """

    child: Sequence[int]
    ids: Sequence[int]
    q: Sequence[float]


@dataclass(frozen=True)
class Contents:
    """Snapshot of a table as uint8 tensors; the number of entries determines their layout."""

    places: Tensor
    entries: Tensor
    weights: Tensor


class Memory(Protocol):
    """Shared table of ``entries`` entries; one thread may learn while another drafts."""

    entries: int

    def learn(self, text: Text, observation: Observation, temperature: float, reader: int | None, now: int) -> None:
        """Learn the target's distributions after the end of ``text``, in this table and in the request's own.

        Args:
            text: of the request, as it was before this decoding step.
            observation: distributions of this decoding step.
            temperature: of the request, 0 for greedy.
            reader: mark of the request, see ``mark_of``; None leaves the shared table unchanged.
            now: seconds since the epoch.
        """
        ...

    def learn_tokens(self, text: Text, tokens: NDArray[np.int32], drafted: bool, now: int) -> None:
        """Learn ``tokens`` that the target put after ``text`` with unknown distributions, and append them.

        Each token counts as if the target had given it probability 1. With ``drafted``, the accuracy of drafts behind
        this text is counted too: at any temperature as the frequency with which the most probable token came.
        """
        ...

    def predict(self, text: Text, most: int) -> tuple[list[int], list[float]]:
        """Return up to ``most`` tokens that may follow ``text``, in descending order, and their probabilities."""
        ...

    def drop(self, before: int = 0, reader: int = 0) -> int:
        """Remove old entries and those of a request; return how many were removed.

        Args:
            before: time in seconds since the epoch; entries last learnt earlier are removed.
            reader: mark of a request; entries that it may have touched are removed. 0 for none.
        """
        ...

    def used(self) -> int:
        """Return the number of entries in use."""
        ...

    def contents(self) -> Contents:
        """Return a copy of the whole table."""
        ...

    def load(self, contents: Contents) -> None:
        """Replace the table's contents by those of another table with the same number of entries."""
        ...


def mark_of(request: str) -> int:
    """Return the mark of a request: a mask of 32 bits, with one or two bits set.

    An entry holds the union of the marks of its requests, so it may also match other requests. The choices of one
    response, whose ids end in -0, -1 and so on, share a mark.
    """
    response = re.sub(r"(?<=.)-[0-9]{1,4}$", "", request)
    number = crc32(response.encode())
    return 1 << (number & 31) | 1 << (number >> 5 & 31)


class Drafting(Protocol):
    """Drafter over the memories of several sequences, for one thread."""

    def draft(self, queries: Sequence[DraftQuery], most: int, floor: float, chains: bool) -> DraftNodes:
        """Draft the most probable nodes of all sequences together.

        Args:
            queries: of the sequences.
            most: limit of nodes over all sequences.
            floor: least chance of a node to be accepted.
            chains: whether a node has at most one child.
        """
        ...

    def draw(self, queries: Sequence[DraftQuery], most: int, floor: float) -> tuple[DraftNodes, ChildDraws]:
        """Draft for sampled sequences; the last child of each node is drawn from the mixture.

        The number of children of a node is fixed before the draw: another child is added while it raises the expected
        number of accepted nodes by at least ``floor``. The queries must not have constraints: a forbidden token would
        have to be removed after its draw, which is not lossless.
        """
        ...


class Backend(Protocol):
    """Factory of memories, texts and drafters; one in C and one in Python."""

    def memory(self, entries: int, /) -> Memory:
        """Return an empty table.

        Raises:
            MemoryError: the allocation failed.
        """
        ...

    def text(self, room: int) -> Text:
        """Return an empty text of up to ``room`` tokens.

        Raises:
            MemoryError: the allocation failed.
        """
        ...

    def drafting(self) -> Drafting:
        """Return a drafter over the memories and texts of this backend."""
        ...
