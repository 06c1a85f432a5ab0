"""Recall drafter: an n-gram cache of the target's own distributions, see ``osd.recall.memory``."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from osd.config import RecallDrafterSettings
from osd.drafting.base import Drafter, Needs, required
from osd.drafting.growth import Growth
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    CommittedTokens,
    DraftRequest,
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
    """Drafter of the tokens that the target produced after the same last tokens."""

    kind: ClassVar[str] = "recall"
    needs = Needs(target_rows=True)

    @classmethod
    def initial(cls, settings: RecallDrafterSettings, target_dir: Path, cache: Path) -> Recall:
        return cls()

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Recall:
        return cls().check_config(config)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> RecallSession:
        return RecallSession(self.kind, runtime)


_FAINT = 0.02
"""Least chance of a drafted node."""


@dataclass
class _Reader:
    """State of a slot: its text, the table of its client, and its mark there, None if recall does not learn from it."""

    text: Text
    memory: Memory
    mark: int | None
    temperature: float = 0.0


class RecallSession(Session):
    """Session without weights."""

    def __init__(self, kind: str, runtime: Runtime) -> None:
        """Draft from the runtime's memories, for a drafter of ``kind``."""
        self._memories = memories = required(kind, "the memories of its domain", runtime.memories)
        self._drafting = memories.backend.drafting()
        # The first half has room for a prediction.
        self._spare = [memories.backend.text(2 * runtime.context) for _ in range(runtime.slots)]
        self._context = runtime.context
        self._readers: dict[int, _Reader] = {}
        self._now = 0  # never decreases: entries learnt after the clock was set back must not look older

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
        """Return the most probable nodes; with prices, only nodes worth more than their price."""
        queries = self.queries(request)
        return self.proposal(queries, self.draft(queries, request, growth), request)

    def propose_after(self, request: DraftRequest, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        """Return the most probable nodes behind ``chains`` of certain tokens, one chain per sequence."""
        queries = [_after(query, chain) for query, chain in zip(self.queries(request), chains, strict=True)]
        return self.proposal(queries, self.draft(queries, request, growth), request)

    def queries(self, request: DraftRequest) -> list[DraftQuery]:
        """Return the queries to the tables, one for each sequence."""
        readers = [self._readers[slot] for slot in request.slots]
        for reader, settings in zip(readers, request.settings, strict=True):
            reader.temperature = settings.temperature
        keys = request.keys or [(0, 0)] * len(readers)
        constraints = [None] * len(readers) if request.penalties is None else request.penalties.constraints
        return [
            DraftQuery(reader.memory, reader.text, limit, reader.temperature, None, *key, (), *_allowed(constraint))
            for reader, limit, key, constraint in zip(readers, request.limits, keys, constraints, strict=True)
        ]

    def draft(self, queries: Sequence[DraftQuery], request: DraftRequest, growth: Growth) -> DraftNodes:
        """Return the most probable nodes of all sequences whose value may exceed the price of their rows."""
        most, floor = _bounds(request)
        return self._drafting.draft(queries, most, floor, growth.chains)

    def proposal(
        self, queries: Sequence[DraftQuery], nodes: DraftNodes, request: DraftRequest, other: str = ""
    ) -> Proposal:
        """Return the ``nodes`` whose value exceeds their price.

        If candidates may be drawn, return drawn nodes with at least the chance of the last of these instead. ``other``
        names the nodes of another drafter.
        """
        sequences, drawn = len(queries), None
        count = len(nodes.tokens) if request.prices is None else request.prices.step.best(nodes.chances)
        if request.keys and count:
            nodes, sampled = self._drafting.draw(queries, _bounds(request)[0], nodes.chances[count - 1])
            drawn, count = _by_sequence(nodes, sampled, sequences), len(nodes.tokens)
        return Proposal(trees_of(nodes, count, sequences, other), drawn=drawn)

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self.remember(slot, kept)

    def remember(self, slot: int, kept: CommittedTokens, proposals: tuple[Tensor, Tensor] | None = None) -> None:
        """Append committed tokens; learn the target's distributions and another drafter's ``proposals``."""
        reader, rows = self._readers[slot], kept.rows
        drawn = 0 if rows is None else len(rows.path) + 1
        read = len(kept.tokens) - drawn
        reader.text.append(kept.tokens[:read], certain=True)
        if rows is not None:
            self._now = max(self._now, int(time.time()))
            distributions = distributions_of(rows, kept.tokens[read:], proposals)
            reader.memory.learn(reader.text, distributions, reader.temperature, reader.mark, self._now)
            reader.text.append(kept.tokens[read:], certain=False)

    def close(self, slot: int) -> None:
        self._spare.append(self._readers.pop(slot).text)


def _allowed(constraint: TokenConstraint | None) -> tuple[Allowed | None, int]:
    if constraint is None:
        return None, 0
    return lambda path: constraint.allowed(tuple(path)), constraint.vocabulary


def _after(query: DraftQuery, chain: Sequence[int]) -> DraftQuery:
    """Return the query for drafts after ``chain``."""
    ahead, allowed = tuple(chain), query.allowed
    return replace(query, ahead=ahead, allowed=None if allowed is None else lambda path: allowed((*ahead, *path)))


def _bounds(request: DraftRequest) -> tuple[int, float]:
    """Return the most nodes of all sequences, and the least chance of a node that can exceed its price."""
    most = sum(request.limits)
    if request.prices is None:
        return most, _FAINT
    step = request.prices.step
    return min(most, step.room), max(step.floor(), _FAINT)


def _by_sequence(nodes: DraftNodes, sampled: ChildDraws, sequences: int) -> DrawnChildren:
    """Return the distributions of last children, ordered by sequence: its root, then its nodes."""
    drawn = DrawnChildren(array("q"), array("q"), array("f"))
    for number, places in enumerate(nodes.numbers(sequences)):
        for row in (number, *(sequences + place for place in places)):
            drawn.child.append(sampled.child[row])
            drawn.ids.extend(sampled.ids[KEPT * row : KEPT * (row + 1)])
            drawn.q.extend(sampled.q[KEPT * row : KEPT * (row + 1)])
    return drawn


def trees_of(nodes: DraftNodes, count: int, sequences: int, other: str = "") -> list[Tree]:
    """Return the trees of the first ``count`` nodes; ``other`` names the nodes of another drafter."""
    names = (*SOURCES, other, BEHIND)
    tokens, parents, sources, orders = ([list[Any]() for _ in range(sequences)] for _ in range(4))
    for number, owner in enumerate(nodes.owners[:count]):
        level = nodes.levels[number]
        tokens[owner].append(nodes.tokens[number])
        parents[owner].append(nodes.parents[number])
        sources[owner].append(names[level])
        orders[owner].append(level // 2 + 1 if level < COPY else 0)
    parts = zip(tokens, parents, sources, orders, nodes.kept(count, sequences), strict=True)
    return [Tree(*part[:3], orders=part[3], chances=part[4]) for part in parts]


def distributions_of(
    rows: TargetRows, drawn: Sequence[int], proposals: tuple[Tensor, Tensor] | None = None
) -> Observation:
    """Return the target's distributions in a step that committed ``drawn``, the tokens of the path and one more."""
    assert rows.top is not None  # noqa: S101  the engine passes it to drafters that read target rows
    tree = rows.tree
    count = 1 + len(tree.tokens)
    following = [-1] * count
    for node, token in zip([ROOT, *rows.path], drawn, strict=True):
        following[1 + node] = token
    return Observation(tree.tokens, tree.parents, rows.top.ids[:count], rows.top.logp[:count], following, proposals)
