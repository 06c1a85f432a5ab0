"""The drafter that recalls."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from osd.config import RecallDrafterSettings
from osd.drafting.base import Drafter, DrafterError, Needs
from osd.drafting.growth import Growth
from osd.drafting.recall.memories import Memories
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    DraftRequest,
    Kept,
    Origin,
    Proposal,
    Runtime,
    Session,
    TargetRows,
    Tree,
)
from osd.recall.memory import (
    BEHIND,
    COPY,
    KEPT,
    SOURCES,
    Allowed,
    ChildDraws,
    DraftNodes,
    DraftQuery,
    Memory,
    Observation,
    Text,
    mark_of,
)
from osd.verification.draws import DrawnChildren
from osd.verification.noise import Noise
from osd.verification.penalties import TokenConstraint
from osd.verification.tree import ROOT


class Recall(Drafter):
    """Drafts what the target said after the same last tokens; see ``osd.recall.memory``."""

    kind: ClassVar[str] = "recall"

    @classmethod
    def initial(cls, settings: RecallDrafterSettings, target_dir: Path, home: Path) -> Recall:
        return cls()

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Recall:
        drafter = cls()
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        return Needs(target_rows=True)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> RecallSession:
        if runtime.memories is None:
            raise DrafterError("a recall drafter needs the memories of its domain")
        return RecallSession(runtime.memories, runtime)


_FAINT = 0.02
"""Chance below which nothing is drafted, with and without prices."""


@dataclass
class _Reader:
    """Sequence: its text, the memory of its client, and its mark there, None if recall must not learn from it."""

    text: Text
    memory: Memory
    mark: int | None
    temperature: float = 0.0


class RecallSession(Session):
    """Session without weights."""

    def __init__(self, memories: Memories, runtime: Runtime) -> None:
        self._memories = memories
        self._drafting = memories.backend.drafting()
        # The first half has room for a prediction.
        self._spare = [memories.backend.text(2 * runtime.context) for _ in range(runtime.slots)]
        self._context = runtime.context
        self._readers: dict[int, _Reader] = {}
        self._now = 0  # a clock that is set back must not make what is learnt then look older than the rest

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        text = self._spare.pop()
        text.clear()
        if origin.prediction:
            text.append(origin.prediction[: self._context], certain=True)
        text.append([token], certain=False)
        mark = mark_of(origin.request) if origin.remembered else None
        self._readers[slot] = _Reader(text, self._memories.of(origin.client, origin.tenant), mark)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(continuation=self)

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """See ``Session.propose``; with prices as many nodes as pay, the most probable ones of all sequences."""
        sought = self.sought(request)
        return self.proposal(sought, self.draft(sought, request, growth), request)

    def behind(self, request: DraftRequest, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        """Draft behind forced tokens; see ``Continuation``."""
        sought = [_behind(one, chain) for one, chain in zip(self.sought(request), chains, strict=True)]
        return self.proposal(sought, self.draft(sought, request, growth), request)

    def sought(self, request: DraftRequest) -> list[DraftQuery]:
        """Return the queries to the memory, one for each sequence."""
        readers = [self._readers[slot] for slot in request.slots]
        for reader, settings in zip(readers, request.settings, strict=True):
            reader.temperature = settings.temperature
        keys = request.keys or [(0, 0)] * len(readers)
        constraints = [None] * len(readers) if request.penalties is None else request.penalties.constraints
        return [
            DraftQuery(reader.memory, reader.text, limit, reader.temperature, None, *key, (), *_allowed(constraint))
            for reader, limit, key, constraint in zip(readers, request.limits, keys, constraints, strict=True)
        ]

    def draft(self, sought: Sequence[DraftQuery], request: DraftRequest, growth: Growth) -> DraftNodes:
        """Return the most probable nodes of all sequences, as many as may be worth their rows."""
        most, floor = _bounds(request)
        return self._drafting.draft(sought, most, floor, growth.chains)

    def proposal(
        self, sought: Sequence[DraftQuery], found: DraftNodes, request: DraftRequest, other: str = ""
    ) -> Proposal:
        """Return the nodes of ``found`` that pay, or, where candidates may be drawn, nodes as good as the last of them.

        ``other`` names the nodes of another drafter.
        """
        several, drawn = len(sought), None
        count = len(found.tokens) if request.prices is None else request.prices.step.best(found.chances)
        if request.keys and count:
            found, sampled = self._drafting.draw(sought, _bounds(request)[0], found.chances[count - 1])
            drawn, count = _by_sequence(found, sampled, several), len(found.tokens)
        return Proposal(trees_of(found, count, several, other), drawn=drawn)

    def commit(self, slot: int, kept: Kept) -> None:
        self.remember(slot, kept)

    def remember(self, slot: int, kept: Kept, others: tuple[Tensor, Tensor] | None = None) -> None:
        """Append committed tokens, and learn the target's distributions and those of another drafter."""
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


def _allowed(constraint: TokenConstraint | None) -> tuple[Allowed | None, int]:
    if constraint is None:
        return None, 0
    return lambda path: constraint.allowed(tuple(path)), constraint.vocabulary


def _behind(one: DraftQuery, chain: Sequence[int]) -> DraftQuery:
    """The same behind a chain of tokens."""
    ahead, allowed = tuple(chain), one.allowed
    return replace(one, ahead=ahead, allowed=None if allowed is None else lambda path: allowed((*ahead, *path)))


def _bounds(request: DraftRequest) -> tuple[int, float]:
    """Return the most nodes of all sequences, and the chance below which none can pay."""
    most = sum(request.limits)
    if request.prices is None:
        return most, _FAINT
    step = request.prices.step
    return min(most, step.room), max(step.floor(), _FAINT)


def _by_sequence(found: DraftNodes, sampled: ChildDraws, sequences: int) -> DrawnChildren:
    """Return the distributions of last children, in order of the roots and nodes of each sequence."""
    drawn = DrawnChildren(array("q"), array("q"), array("f"))
    for number, places in enumerate(found.numbers(sequences)):
        for row in (number, *(sequences + place for place in places)):
            drawn.child.append(sampled.child[row])
            drawn.ids.extend(sampled.ids[KEPT * row : KEPT * (row + 1)])
            drawn.q.extend(sampled.q[KEPT * row : KEPT * (row + 1)])
    return drawn


def trees_of(nodes: DraftNodes, count: int, sequences: int, other: str = "") -> list[Tree]:
    """Return the trees of the first ``count`` nodes; ``other`` names the nodes of another drafter."""
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
    parts = zip(tokens, parents, sources, orders, nodes.kept(count, sequences), strict=True)
    return [Tree(*part[:3], orders=part[3], chances=part[4]) for part in parts]


def heard(rows: TargetRows, drawn: Sequence[int], others: tuple[Tensor, Tensor] | None = None) -> Observation:
    """Return the target's distributions in a step that committed ``drawn``: the tokens of the path, and one more."""
    assert rows.top is not None  # noqa: S101  the engine gives it to drafters that read target rows
    tree = rows.tree
    count = 1 + len(tree.tokens)
    following = [-1] * count
    for node, token in zip([ROOT, *rows.path], drawn, strict=True):
        following[1 + node] = token
    return Observation(tree.tokens, tree.parents, rows.top.ids[:count], rows.top.logp[:count], following, others)
