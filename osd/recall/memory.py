"""What recall remembers: a table of all requests' distributions, and the text of each request that runs.

For each context, the last n tokens for n = 1 to 4, the table holds the running mean of the target's distributions
there, of which the most probable tokens are kept. A request has a small table of its own, in which the tokens of its
prompt count as certain, and knows where in its text the last five tokens stood before. What all of these say is mixed:
a longer context on top of a shorter one, the request's own on top of what is shared, a copy on top of all. An entry
that was learnt c times gets ``c / (c + kappa)`` of the mass, and each kappa follows what would have told the target's
distributions better. How probably the target takes a token of the mixture is not taken from it but counted, by what it
came from and how probable it was.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) keeps the target's most probable tokens after single tokens;
REST (He et al. 2023, arXiv 2311.08252) and prompt lookup copy what followed the longest match. The interpolation is
that of language models by counts (Jelinek and Mercer 1980; Witten and Bell 1991).
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
"""Lengths of the contexts, from one token on."""
KEPT = 8
"""Tokens that an entry keeps."""
COPY = 2 * ORDERS
"""The level of a copy: levels below are 2 (order - 1) for a shared entry, and one more for one of the request's own."""
OTHER = COPY + 1
"""The level of what another drafter says, mixed in on top."""
FORCED = OTHER + 1
"""The level of a token that a grammar leaves no choice about behind the nodes before it."""
SOURCES = ("recall", "request") * ORDERS + ("copy",)
"""What a node is called, by the level on top of the mixture that it came from."""
BEHIND = "forced"
"""What one of the level ``FORCED`` is called."""

Allowed = Callable[[Sequence[int]], NDArray[np.bool_] | None]
"""[vocabulary] which tokens may come after a path of draft nodes; None where the path itself may not.

A mask stays where it is, and as it is, until the draft is made.
"""


@dataclass(frozen=True)
class Other:
    """What another drafter says along its own draft: ``path`` [L] are its tokens.

    ``ids`` [1 + L, 8] int64, -1 for nothing, and ``p`` [1 + L, 8] float32 are its most probable tokens before the first
    and after each of them.
    """

    path: Tensor
    ids: Tensor
    p: Tensor


@dataclass(frozen=True)
class Heard:
    """What the target said after the end of a text, and after each of the N nodes of a draft on it.

    ``ids`` [1 + N, k] int64 and ``logp`` [1 + N, k] are its most probable tokens; ``following`` [1 + N] the tokens that
    came where the output went on, -1 elsewhere. ``others`` are what another drafter said at the same places: its ids
    [1 + N, 8] int64, -1 for nothing, and their probabilities.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    ids: Tensor
    logp: Tensor
    following: Sequence[int]
    others: tuple[Tensor, Tensor] | None = None


class Text(Protocol):
    """The text of one request."""

    def clear(self) -> None:
        """Begin another one."""
        ...

    def append(self, tokens: Sequence[int], certain: bool) -> None:
        """Append tokens; ``certain`` ones count as what the target says where they stand."""
        ...

    def equals(self, tokens: NDArray[np.int32]) -> bool:
        """Whether these are all of its tokens; ``tokens`` [n] lie one beside the other."""
        ...


@dataclass(frozen=True)
class Sought:
    """A sequence to draft for, at most ``limit`` nodes, of a ``temperature``, 0 for greedy.

    Tokens that are drawn are drawn by the round ``step`` of its ``seed``, see ``osd.verification.noise``. Nodes stand
    behind the tokens ``ahead``, of which it is certain that they come first. Where nothing is drawn, nodes are among
    those of ``vocabulary`` tokens that are ``allowed`` there, None for all.
    """

    memory: Memory
    text: Text
    limit: int
    temperature: float
    other: Other | None = None
    seed: int = 0
    step: int = 0
    ahead: Sequence[int] = ()
    allowed: Allowed | None = None
    vocabulary: int = 0


@dataclass(frozen=True)
class Found:
    """Draft nodes of several sequences, from the most probable on.

    Of each the owner, a number of a sequence, the parent, -1 or an earlier node of the same sequence, the token, the
    level that it came from, and the chance that it is on the path that the target keeps.
    """

    owners: list[int]
    parents: list[int]
    tokens: list[int]
    levels: list[int]
    chances: list[float]

    def kept(self, count: int, sequences: int) -> list[list[float]]:
        """Of each of so many sequences the chances of its nodes among the first ``count``, in their order."""
        chances: list[list[float]] = [[] for _ in range(sequences)]
        for owner, chance in zip(self.owners[:count], self.chances[:count], strict=True):
            chances[owner].append(chance)
        return chances

    def numbers(self, sequences: int) -> list[list[int]]:
        """Of each of so many sequences the places of its nodes, in their order."""
        places: list[list[int]] = [[] for _ in range(sequences)]
        for place, owner in enumerate(self.owners):
            places[owner].append(place)
        return places


@dataclass(frozen=True)
class Sampled:
    """What the last children of nodes were drawn from, of the roots of all sequences and then of the nodes found.

    ``child`` is the number of that child within its sequence, -1 where there is none, ``ids`` are 8 tokens each and
    ``q`` their probabilities, off the children that were chosen before it, 0 where there are none.
    """

    child: Sequence[int]
    ids: Sequence[int]
    q: Sequence[float]


@dataclass(frozen=True)
class Contents:
    """All that a table holds: uint8 tensors, of a layout that the number of entries settles."""

    places: Tensor
    entries: Tensor
    weights: Tensor


class Memory(Protocol):
    """A table of ``entries`` entries; any thread may learn while another one drafts."""

    entries: int

    def learn(self, text: Text, heard: Heard, temperature: float, reader: int | None, now: int) -> None:
        """Learn what the target said after the end of ``text``; the request's own table learns it too.

        Args:
            text: of the request, as it was before this round.
            heard: in this round.
            temperature: of the request, 0 for greedy.
            reader: the mark of the request, see ``mark_of``; None for one that must not be remembered.
            now: seconds of the epoch.
        """
        ...

    def hear(self, text: Text, tokens: NDArray[np.int32], drafted: bool, now: int) -> None:
        """Learn ``tokens`` of which nothing is known but that the target said them after ``text``, and append them.

        Each counts as all that the target said there. Where drafts could have been made behind this text (``drafted``),
        it is counted how right they would be: at any temperature as often as what is most probable came.
        """
        ...

    def says(self, text: Text, most: int) -> tuple[list[int], list[float]]:
        """Up to ``most`` tokens that may follow ``text``, from the most probable on, and their probabilities."""
        ...

    def drop(self, before: int = 0, reader: int = 0) -> int:
        """Drop entries that were last learnt before a time, and all that a request may have touched; says how many."""
        ...

    def used(self) -> int:
        """Entries in use."""
        ...

    def contents(self) -> Contents:
        """A copy of everything."""
        ...

    def load(self, contents: Contents) -> None:
        """Take over what another table of as many entries held."""
        ...


def mark_of(request: str) -> int:
    """Two of 32 bits that stand for a request: an entry knows the marks of those that it was learnt from.

    The choices of one response, whose ids end in -0, -1 and so on, have one mark.
    """
    response = re.sub(r"(?<=.)-[0-9]{1,4}$", "", request)
    number = crc32(response.encode())
    return 1 << (number & 31) | 1 << (number >> 5 & 31)


class Drafting(Protocol):
    """Drafts by the memories of several sequences; on one thread."""

    def draft(self, sought: Sequence[Sought], most: int, floor: float, chains: bool) -> Found:
        """Draft the most probable nodes of all sequences: one heap over the candidates of them all.

        Args:
            sought: the sequences.
            most: nodes of all of them together.
            floor: the chance that a node is kept below which none is drafted.
            chains: whether no node may have a second child.
        """
        ...

    def draw(self, sought: Sequence[Sought], most: int, floor: float) -> tuple[Found, Sampled]:
        """The same for sequences that are not greedy, with a last child of each node that is drawn from the mixture.

        How many children a node has is settled before one is drawn: as long as one more adds ``floor`` to what is kept.
        """
        ...


class Backend(Protocol):
    """What makes them: one in C, and one in Python."""

    def memory(self, entries: int, /) -> Memory:
        """An empty table.

        Raises:
            MemoryError: there is no room for it.
        """
        ...

    def text(self, room: int) -> Text:
        """A text of up to ``room`` tokens.

        Raises:
            MemoryError: there is no room for it.
        """
        ...

    def drafting(self) -> Drafting:
        """What drafts by the memories and texts of this backend."""
        ...
