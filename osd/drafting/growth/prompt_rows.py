"""How many prompt tokens hang on each node of a draft: rows of the target's forward that say what comes after next.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). A node with c prompt tokens lets the next draft be c tokens deep where the output goes
on after it: that is the state the next round is in. F_c is what a draft is expected to have accepted in state c, so
that the last prompt token of a node after which the output goes on with probability pc is worth
``pc (F_c - F_(c-1))``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from osd.drafting.growth.tree_shape import best_paths, shape_of_paths
from osd.economy.plan import StepBudget
from osd.verification.tree import ROOT

Table = Sequence[Sequence[float]]
"""How often the candidate of each rank is right after a right path, by depth and then by rank."""

_MOST_TURNS = 8
"""Improvements of a plan, which is settled after two or three."""

_LEAST = 0.01
"""Tokens: a prompt token that brings less than that is not looked at where it has to pay."""

_NEVER = 1e6
"""How many times as long as the largest that was measured a forward is taken to be that is larger, for each row."""


def kept_shares(parents: Sequence[int], table: Table) -> list[float]:
    """How often each node of a draft is kept, by the ranks on its path; what ``table`` does not have never is."""
    children: dict[int, int] = {}
    places: list[tuple[int, float]] = []  # depth and share of each node
    for parent in parents:
        depth, above = (0, 1.0) if parent == ROOT else (places[parent][0] + 1, places[parent][1])
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        known = depth < len(table) and rank < len(table[depth])
        places.append((depth, above * table[depth][rank] if known else 0.0))
    return [share for _, share in places]


def ends(parents: Sequence[int], shares: Sequence[float]) -> list[float]:
    """How often the kept path ends at the root and at each node, where nodes are kept as often as ``shares`` say."""
    found = [1.0, *shares]
    for parent, share in zip(parents, shares, strict=True):
        found[1 + parent] -= share
    return [max(0.0, share) for share in found]


def expected_accepted(table: Table, nodes: int, price: float = 0.0) -> list[float]:
    """F_0, F_1, ...: tokens accepted of drafts of 0, 1, ... levels, the best of ``nodes`` nodes.

    With a ``price`` they are less what their nodes cost, and have none that is worth less.
    """
    return [
        sum(max(0.0, share - price) for _, share in best_paths(table[:levels], nodes))
        for levels in range(len(table) + 1)
    ]


def drop_order(places: Sequence[float], gains: Sequence[float]) -> list[int]:
    """In which order prompt tokens go, by their places: the smallest loss first, among equals that of the last place.

    As long as another place has two, none loses its only one.

    Args:
        places: how often the path ends at the root and at each node; each begins with as many as there are ``gains``.
        gains: F_0 to F_n.
    """
    counts = [len(gains) - 1] * len(places)
    order: list[int] = []

    def loss(place: int) -> tuple[float, int]:
        return places[place] * (gains[counts[place]] - gains[counts[place] - 1]), -place

    for least in (1, 0):
        pending = [loss(place) for place, count in enumerate(counts) if count > least]
        heapq.heapify(pending)
        while pending:
            place = -heapq.heappop(pending)[1]
            order.append(place)
            counts[place] -= 1
            if counts[place] > least:
                heapq.heappush(pending, loss(place))
    return order


def allotted(places: Sequence[float], gains: Sequence[float], most: int) -> list[int]:
    """How many prompt tokens the root and each node get where all have ``most`` together; see ``drop_order``."""
    counts = [len(gains) - 1] * len(places)
    for place in drop_order(places, gains)[: max(0, sum(counts) - most)]:
        counts[place] -= 1
    return counts


def paying(
    places: Sequence[Sequence[float]], gains: Sequence[float], most: Sequence[int], copies: int, budget: StepBudget
) -> list[list[int]]:
    """How many prompt tokens each place gets where all together have to be worth the time of their rows.

    Those that bring most for a row come first, of all sequences of the round, and as many of them ride as together
    bring most: what rows cost rises in steps, so that one row may be free where three are not.

    Args:
        places: by sequence, how often the path ends at the root and at each node.
        gains: F_0 to F_n.
        most: prompt tokens that each sequence may have.
        copies: rows of each.
        budget: of the step without them.
    """
    counts, left = [[0] * len(mine) for mine in places], list(most)
    steps = [
        (pc * gain / (to - since), b, place, since, to)
        for since, to, gain in _hull(gains)
        for b, mine in enumerate(places)
        for place, pc in enumerate(mine)
        if pc * gain > _LEAST * (to - since)
    ]
    best, chosen, brought, rows = 0.0, 0, 0.0, budget.rows
    taken: list[tuple[int, int, int]] = []  # places and what they had before
    for each, b, place, since, to in sorted(steps, key=lambda step: -step[0]):
        more = (to - since) * copies
        if counts[b][place] != since or to - since > left[b] or rows + more >= len(budget.seconds):
            continue
        counts[b][place], left[b], rows = to, left[b] - (to - since), rows + more
        brought += each * (to - since)
        taken.append((b, place, since))
        value = brought - budget.rho * float(budget.seconds[rows] - budget.seconds[budget.rows])
        if value > best:
            best, chosen = value, len(taken)
    for b, place, since in reversed(taken[chosen:]):
        counts[b][place] = since
    return counts


def _hull(gains: Sequence[float]) -> list[tuple[int, int, float]]:
    """Steps (from, to, gain) from 0 on as long as they gain, each to where most is gained for a prompt token."""
    found, at = [], 0
    while at < len(gains) - 1:
        to = max(range(at + 1, len(gains)), key=lambda count: (gains[count] - gains[at]) / (count - at))
        if gains[to] <= gains[at]:
            break
        found.append((at, to, gains[to] - gains[at]))
        at = to
    return found


def stationary(moves: Sequence[Sequence[float]]) -> list[float]:
    """How often each state is met in the long run, ``moves[d][c]`` being how often c follows d."""
    count = len(moves)
    equations = np.vstack([np.array(moves).T - np.eye(count), np.ones(count)])
    found = np.linalg.lstsq(equations, np.append(np.zeros(count), 1.0), rcond=None)[0]
    return np.clip(found, 0.0, 1.0).tolist()


@dataclass(frozen=True)
class StatePlan:
    """What a round does in one state: the ``paths`` of its draft, its prompt tokens, and what is expected of it.

    ``moves`` [n + 1] says how often each state follows, ``accepted`` how many tokens are, and ``seconds`` what the
    forward takes.
    """

    paths: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    accepted: float
    moves: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What rounds do in the states 0 to n, and the tokens per second that this gives in the long run."""

    states: tuple[StatePlan, ...]
    speed: float


def best_plan(table: Table, budget: int, levels: int, rows: int, seconds: Mapping[int, float] | None) -> Plan:
    """The drafts of all states that together give the most tokens per second.

    That is ``sum_d pi_d (1 + F_d) / sum_d pi_d L_d`` with the stationary law pi, which for one state is the largest
    ``tau(n) / L(n)``. Each state takes the best paths of so many nodes, of its depth, and loses prompt tokens in the
    order of ``drop_order``, none its only one; how many of either is improved state by state, as policies are (Howard
    1960), until nothing gets better. The paper tries sizes on a grid.

    Args:
        table: of the drafter's candidates.
        budget: nodes of a draft at most.
        levels: prompt tokens of a node at most, n.
        rows: that each of them takes in a forward.
        seconds: of a forward by its rows; None for as much as there may be. No size beyond what was measured is taken,
            but for the smallest draft that there is.
    """
    took = _seconds_of(1 + budget + rows * levels * (1 + budget), seconds)
    choices = [_Choices(table[:depth], budget, levels, rows, took) for depth in range(levels + 1)]
    gains = [one.most for one in choices]
    after, speed, found = gains, 0.0, None
    for _ in range(_MOST_TURNS):
        chosen = tuple(one.best(gains, after, speed) for one in choices)
        law = stationary([one.moves for one in chosen])
        tokens = sum(share * (1 + one.accepted) for share, one in zip(law, chosen, strict=True))
        speed = tokens / sum(share * one.seconds for share, one in zip(law, chosen, strict=True))
        if found is not None and speed <= found.speed * (1 + 1e-9):
            break
        found = Plan(chosen, speed)
        gains = [one.accepted for one in chosen]
        # What a state is worth beside the last: h = 1 + F - speed L + moves h.
        worth = [1 + one.accepted - speed * one.seconds for one in chosen]
        equations = np.eye(levels + 1) - np.array([one.moves for one in chosen])
        equations = np.vstack([equations, np.eye(levels + 1)[-1]])
        after = np.linalg.lstsq(equations, np.append(worth, 0.0), rcond=None)[0].tolist()
    assert found is not None  # noqa: S101  there was a first turn
    return found


class _Choices:
    """What there is to choose from in a state: the best paths of each number, and the prompt tokens behind them."""

    def __init__(self, table: Table, budget: int, levels: int, rows: int, took: Sequence[float]) -> None:
        """A state of as many levels as ``table`` has; ``took`` are the seconds of a forward by its rows."""
        self._levels, self._rows, self._took = levels, rows, took
        self._drafts: list[tuple[tuple[tuple[int, ...], ...], float, list[float]]] = []
        paths = best_paths(table, budget)
        for nodes in range(min(1, len(paths)), len(paths) + 1):
            share = dict(paths[:nodes])
            shape = tuple(sorted(share, key=lambda path: (len(path), path)))
            shares = [share[path] for path in shape]
            self._drafts.append((shape, sum(shares), ends(shape_of_paths(shape), shares)))
        self.most = self._drafts[-1][1]

    def best(self, gains: Sequence[float], after: Sequence[float], speed: float) -> StatePlan:
        """What is best where ``after`` says what each state is worth, and ``speed`` what a second is."""
        best, found = -math.inf, (0, 0)
        for number, (_, accepted, places) in enumerate(self._drafts):
            counts, size = [self._levels] * len(places), len(places) * (1 + self._rows * self._levels)
            value = 1 + accepted + sum(places) * after[self._levels]
            for dropped, place in enumerate([-1, *self._order(places, gains)]):
                if place >= 0:
                    value += places[place] * (after[counts[place] - 1] - after[counts[place]])
                    counts[place] -= 1
                    size -= self._rows
                if value - speed * self._took[size] > best:
                    best, found = value - speed * self._took[size], (number, dropped)
        shape, accepted, places = self._drafts[found[0]]
        counts = [self._levels] * len(places)
        for place in self._order(places, gains)[: found[1]]:
            counts[place] -= 1
        moves = [sum(pc for pc, count in zip(places, counts, strict=True) if count == c) for c in range(len(gains))]
        return StatePlan(shape, sum(counts), accepted, tuple(moves), self._took[len(places) + self._rows * sum(counts)])

    def _order(self, places: Sequence[float], gains: Sequence[float]) -> list[int]:
        return drop_order(places, gains)[: len(places) * (self._levels - 1)]


def _seconds_of(most: int, seconds: Mapping[int, float] | None) -> list[float]:
    """Seconds of a forward of 0, 1, ... ``most`` rows: straight lines, and far too many behind what was measured."""
    if seconds is None:
        return [1.0] * (most + 1)
    known = sorted(seconds)
    found = np.interp(range(most + 1), known, [seconds[count] for count in known])
    beyond = np.maximum(np.arange(most + 1) - known[-1], 0)
    return (found * np.where(beyond, _NEVER * beyond, 1.0)).tolist()
