"""Recall's session: drafts by what its memory says, and remembers every verified row."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from osd.drafting.growth import Growth
from osd.drafting.recall.memories import Memories
from osd.drafting.session import NOBODY, Asked, Kept, Origin, Proposal, Runtime, Session, TargetRows, Tree
from osd.recall.memory import BEHIND, COPY, KEPT, SOURCES, Allowed, Found, Heard, Memory, Sampled, Sought, Text, mark_of
from osd.verification.draws import LastDrawn
from osd.verification.noise import Noise
from osd.verification.penalties import Constraint
from osd.verification.tree import ROOT

_FAINT = 0.02
"""The chance below which nothing is drafted where nobody asks what it is worth."""


@dataclass
class _Reader:
    """A sequence: its text, the memory of its client, and its mark there, None if it must not be remembered.

    ``temperature`` is that of its request.
    """

    text: Text
    memory: Memory
    mark: int | None
    temperature: float = 0.0


class RecallSession(Session):
    """Drafts for the sequences of an engine; see ``osd.drafting.session.Session``. It has no weights."""

    def __init__(self, memories: Memories, runtime: Runtime) -> None:
        """Draft by ``memories``, for as many slots and tokens as ``runtime`` says."""
        self._memories = memories
        self._drafting = memories.backend.drafting()
        self._spare = [memories.backend.text(runtime.context) for _ in range(runtime.slots)]
        self._readers: dict[int, _Reader] = {}
        self._now = 0  # a clock that is set back must not make what is learnt then look older than the rest

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        text = self._spare.pop()
        text.clear()
        text.append([token], certain=False)
        mark = mark_of(origin.request) if origin.remembered else None
        self._readers[slot] = _Reader(text, self._memories.of(origin.client, origin.tenant), mark)

    def propose(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        """See ``Session.propose``; with ``Asked.worth`` as many nodes as pay, of all sequences the most probable."""
        sought = self.sought(asked)
        return self.proposal(sought, self.draft(sought, asked, growth), asked)

    def behind(self, asked: Asked, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        sought = [_behind(one, chain) for one, chain in zip(self.sought(asked), chains, strict=True)]
        return self.proposal(sought, self.draft(sought, asked, growth), asked)

    def sought(self, asked: Asked) -> list[Sought]:
        """The sequences as the memory is asked about them."""
        readers = [self._readers[slot] for slot in asked.slots]
        for reader, settings in zip(readers, asked.settings, strict=True):
            reader.temperature = settings.temperature
        keys = asked.keys or [(0, 0)] * len(readers)
        constraints = asked.constraints or [None] * len(readers)
        return [
            Sought(reader.memory, reader.text, limit, reader.temperature, None, *key, (), *_allowed(constraint))
            for reader, limit, key, constraint in zip(readers, asked.limits, keys, constraints, strict=True)
        ]

    def draft(self, sought: Sequence[Sought], asked: Asked, growth: Growth) -> Found:
        """The most probable nodes of all sequences, as many as may be worth their rows."""
        most, floor = _bounds(asked)
        return self._drafting.draft(sought, most, floor, growth.chains)

    def draw(self, sought: Sequence[Sought], asked: Asked, least: float) -> tuple[Found, Sampled]:
        """Nodes of all sequences of which the last of their parent are drawn; each adds ``least`` to what is kept."""
        return self._drafting.draw(sought, _bounds(asked)[0], least)

    def proposal(self, sought: Sequence[Sought], found: Found, asked: Asked, other: str = "") -> Proposal:
        """Of the nodes ``found`` those that pay, or, where candidates may be drawn, nodes as good as the last of these.

        ``other`` is what another drafter's nodes are called.
        """
        several = len(sought)
        count = len(found.tokens) if asked.worth is None else asked.worth.best(found.chances, several)
        drawn = None
        if asked.keys and count:
            found, sampled = self.draw(sought, asked, found.chances[count - 1])
            drawn, count = _by_sequence(found, sampled, several), len(found.tokens)
        trees, chances = trees_of(found, count, several, other), found.kept(count, several)
        return Proposal(trees, chosen=True, drawn=drawn, expected=sum(found.chances[:count]), chances=chances)

    def commit(self, slot: int, kept: Kept) -> None:
        self.remember(slot, kept)

    def remember(self, slot: int, kept: Kept, others: tuple[Tensor, Tensor] | None = None) -> None:
        """Learn from a round what the target said, beside what another drafter did, and go on with the text."""
        reader, rows = self._readers[slot], kept.rows
        drawn = 0 if rows is None else len(rows.path) + 1
        read = len(kept.tokens) - drawn
        reader.text.append(kept.tokens[:read], certain=True)
        if rows is not None:
            self._now = max(self._now, int(time.time()))
            said = heard(rows, kept.tokens[read:], others)
            reader.memory.learn(reader.text, said, reader.temperature, reader.mark, self._now)
            reader.text.append(kept.tokens[read:], certain=False)

    def close(self, slot: int) -> None:
        self._spare.append(self._readers.pop(slot).text)


def _allowed(constraint: Constraint | None) -> tuple[Allowed | None, int]:
    if constraint is None:
        return None, 0
    return lambda path: constraint.allowed(tuple(path)), constraint.vocabulary


def _behind(one: Sought, chain: Sequence[int]) -> Sought:
    """The same behind a chain of tokens."""
    ahead, allowed = tuple(chain), one.allowed
    return replace(one, ahead=ahead, allowed=None if allowed is None else lambda path: allowed((*ahead, *path)))


def _bounds(asked: Asked) -> tuple[int, float]:
    """Nodes of all sequences at most, and the chance below which none of them can pay."""
    most = sum(asked.limits)
    if asked.worth is None:
        return most, _FAINT
    return min(most, asked.worth.room), max(asked.worth.floor(), _FAINT)


def _by_sequence(found: Found, sampled: Sampled, sequences: int) -> LastDrawn:
    """What was drawn from, for the root and the nodes of one sequence after the other."""
    drawn = LastDrawn(array("q"), array("q"), array("f"))
    for number, places in enumerate(found.numbers(sequences)):
        for row in (number, *(sequences + place for place in places)):
            drawn.child.append(sampled.child[row])
            drawn.ids.extend(sampled.ids[KEPT * row : KEPT * (row + 1)])
            drawn.q.extend(sampled.q[KEPT * row : KEPT * (row + 1)])
    return drawn


def trees_of(nodes: Found, count: int, sequences: int, other: str = "") -> list[Tree]:
    """The trees of the first ``count`` nodes; ``other`` is what another drafter's nodes are called."""
    names = (*SOURCES, other, BEHIND)
    tokens: list[list[int]] = [[] for _ in range(sequences)]
    parents: list[list[int]] = [[] for _ in range(sequences)]
    sources: list[list[str]] = [[] for _ in range(sequences)]
    orders: list[list[int]] = [[] for _ in range(sequences)]
    for owner, parent, token, level in zip(
        nodes.owners[:count], nodes.parents[:count], nodes.tokens[:count], nodes.levels[:count], strict=True
    ):
        tokens[owner].append(token)
        parents[owner].append(parent)
        sources[owner].append(names[level])
        orders[owner].append(level // 2 + 1 if level < COPY else 0)
    parts = zip(tokens, parents, sources, orders, strict=True)
    return [Tree(token, parent, source, orders=order) for token, parent, source, order in parts]


def heard(rows: TargetRows, drawn: Sequence[int], others: tuple[Tensor, Tensor] | None = None) -> Heard:
    """What the target said in a round that went on with ``drawn``: the tokens of the path, and one more."""
    assert rows.top is not None  # noqa: S101  the engine gives it to drafters that read target rows
    tree = rows.tree
    count = 1 + len(tree.tokens)
    following = [-1] * count
    for node, token in zip([ROOT, *rows.path], drawn, strict=True):
        following[1 + node] = token
    return Heard(tree.tokens, tree.parents, rows.top.ids[:count], rows.top.logp[:count], following, others)
