"""Number of prompt tokens after each node of a draft.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). If the accepted path ends at a node with c prompt tokens, the next draft may have c
levels: c is the state of the next step. F_c is the expected number of accepted tokens in state c. If the path ends at a
node with probability pc, its last prompt token is worth ``pc (F_c - F_(c-1))``.
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
"""Probability that a candidate is accepted after an accepted path, by depth and then by rank."""

_MOST_TURNS = 8
"""Most improvements of a plan; two or three are usually enough."""

_LEAST = 0.01
"""Least value of a prompt token, in tokens, if rows have a price."""

_NEVER = 1e6
"""Factor of the largest measured forward for each row beyond its size."""


def kept_shares(parents: Sequence[int], table: Table) -> list[float]:
    """Return the probability that each node of a draft is accepted, by the ranks on its path; 0 outside ``table``."""
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
    """Return the probability that the accepted path ends at the root and at each node; see ``kept_shares``."""
    rest = [1.0, *shares]
    for parent, share in zip(parents, shares, strict=True):
        rest[1 + parent] -= share
    return [max(0.0, share) for share in rest]


def expected_accepted(table: Table, nodes: int, price: float = 0.0) -> list[float]:
    """Return F_0, F_1, ...: accepted tokens of the best drafts of 0, 1, ... levels and ``nodes`` nodes.

    ``price`` is subtracted for each node, and drafts have only nodes with a higher chance.
    """
    return [
        sum(max(0.0, share - price) for _, share in best_paths(table[:levels], nodes))
        for levels in range(len(table) + 1)
    ]


def drop_order(places: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return the places of prompt tokens in the order of their removal: the smallest loss first, then the last place.

    A place keeps its last prompt token while another place has two.

    Args:
        places: probability that the path ends at the root and at each node; each starts with n prompt tokens.
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
    """Return the number of prompt tokens of the root and each node, ``most`` in total; see ``drop_order``."""
    counts = [len(gains) - 1] * len(places)
    for place in drop_order(places, gains)[: max(0, sum(counts) - most)]:
        counts[place] -= 1
    return counts


def priced(
    places: Sequence[Sequence[float]], gains: Sequence[float], most: Sequence[int], copies: int, budget: StepBudget
) -> list[list[int]]:
    """Return the number of prompt tokens of each place that maximises their value less the price of their rows.

    Prompt tokens are added by their value per row, over all sequences of the step, and the best prefix of this order is
    used: the price of rows increases in steps, so the first row may be free and the third not.

    Args:
        places: by sequence, the probability that the path ends at the root and at each node.
        gains: F_0 to F_n.
        most: most prompt tokens of each sequence.
        copies: rows of a prompt token.
        budget: of the step without prompt tokens.
    """
    counts, left = [[0] * len(chances) for chances in places], list(most)
    steps = [
        (pc * gain / (to - since), b, place, since, to)
        for since, to, gain in _hull(gains)
        for b, chances in enumerate(places)
        for place, pc in enumerate(chances)
        if pc * gain > _LEAST * (to - since)
    ]
    best, chosen, gained, rows = 0.0, 0, 0.0, budget.rows
    taken: list[tuple[int, int, int]] = []  # sequences, places and their previous counts
    for each, b, place, since, to in sorted(steps, key=lambda step: -step[0]):
        more = (to - since) * copies
        if counts[b][place] != since or to - since > left[b] or rows + more >= len(budget.seconds):
            continue
        counts[b][place], left[b], rows = to, left[b] - (to - since), rows + more
        gained += each * (to - since)
        taken.append((b, place, since))
        value = gained - budget.rho * float(budget.seconds[rows] - budget.seconds[budget.rows])
        if value > best:
            best, chosen = value, len(taken)
    for b, place, since in reversed(taken[chosen:]):
        counts[b][place] = since
    return counts


def _hull(gains: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return the concave hull of F as steps (from, to, gain), while they gain."""
    steps, at = [], 0
    while at < len(gains) - 1:
        to = max(range(at + 1, len(gains)), key=lambda count: (gains[count] - gains[at]) / (count - at))
        if gains[to] <= gains[at]:
            break
        steps.append((at, to, gains[to] - gains[at]))
        at = to
    return steps


def stationary(moves: Sequence[Sequence[float]]) -> list[float]:
    """Return the long-run probability of each state; ``moves[d][c]`` is the probability that c follows d."""
    count = len(moves)
    equations = np.vstack([np.array(moves).T - np.eye(count), np.ones(count)])
    law = np.linalg.lstsq(equations, np.append(np.zeros(count), 1.0), rcond=None)[0]
    return np.clip(law, 0.0, 1.0).tolist()


@dataclass(frozen=True)
class StatePlan:
    """Decoding step in one state: ``paths`` of its draft, number of prompt tokens, and expected outcome.

    ``accepted`` is the expected number of accepted tokens, ``moves`` [n + 1] are the probabilities of the next state,
    and ``seconds`` is the time of the forward.
    """

    paths: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    accepted: float
    moves: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class RiderPlan:
    """Steps in the states 0 to n, and their long-run tokens per second."""

    states: tuple[StatePlan, ...]
    speed: float


def best_plan(table: Table, budget: int, levels: int, rows: int, seconds: Mapping[int, float] | None) -> RiderPlan:
    """Return the drafts of all states with the most tokens per second.

    The objective is ``sum_d pi_d (1 + F_d) / sum_d pi_d L_d`` with the stationary law pi. Each state uses the best
    paths of its depth, and removes prompt tokens in the order of ``drop_order`` down to one per place. Both numbers are
    improved state by state until the speed stays the same (policy iteration, Howard 1960). The paper tries a grid.

    Args:
        table: of the drafter's candidates.
        budget: most nodes of a draft.
        levels: n, most prompt tokens of a node.
        rows: of a prompt token in a forward.
        seconds: of a forward by its rows; None for constant time. Only the smallest draft may have more rows.
    """
    took = _seconds_of(1 + budget + rows * levels * (1 + budget), seconds)
    choices = [_Choices(table[:depth], budget, levels, rows, took) for depth in range(levels + 1)]
    gains = [choice.most for choice in choices]
    after, speed, plan = gains, 0.0, None
    for _ in range(_MOST_TURNS):
        states = tuple(choice.best(gains, after, speed) for choice in choices)
        law = stationary([state.moves for state in states])
        tokens = sum(share * (1 + state.accepted) for share, state in zip(law, states, strict=True))
        speed = tokens / sum(share * state.seconds for share, state in zip(law, states, strict=True))
        if plan is not None and speed <= plan.speed * (1 + 1e-9):
            break
        plan = RiderPlan(states, speed)
        gains = [state.accepted for state in states]
        # Values h of the states relative to the last one: h = 1 + F - speed L + moves h.
        worth = [1 + state.accepted - speed * state.seconds for state in states]
        equations = np.eye(levels + 1) - np.array([state.moves for state in states])
        equations = np.vstack([equations, np.eye(levels + 1)[-1]])
        after = np.linalg.lstsq(equations, np.append(worth, 0.0), rcond=None)[0].tolist()
    assert plan is not None  # noqa: S101  the first turn makes one
    return plan


class _Choices:
    """Choices in a state: the best paths for each number of nodes, and their prompt tokens."""

    def __init__(self, table: Table, budget: int, levels: int, rows: int, took: Sequence[float]) -> None:
        """Prepare the state with the depth of ``table``; ``took`` are the seconds of a forward by rows."""
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
        """Return the best choice for the values ``after`` of the states and the value ``speed`` of a second."""
        best, choice = -math.inf, (0, 0)
        for number, (_, accepted, places) in enumerate(self._drafts):
            counts, size = [self._levels] * len(places), len(places) * (1 + self._rows * self._levels)
            value = 1 + accepted + sum(places) * after[self._levels]
            for dropped, place in enumerate([-1, *self._order(places, gains)]):
                if place >= 0:
                    value += places[place] * (after[counts[place] - 1] - after[counts[place]])
                    counts[place] -= 1
                    size -= self._rows
                if value - speed * self._took[size] > best:
                    best, choice = value - speed * self._took[size], (number, dropped)
        shape, accepted, places = self._drafts[choice[0]]
        counts = [self._levels] * len(places)
        for place in self._order(places, gains)[: choice[1]]:
            counts[place] -= 1
        moves = [sum(pc for pc, count in zip(places, counts, strict=True) if count == c) for c in range(len(gains))]
        return StatePlan(shape, sum(counts), accepted, tuple(moves), self._took[len(places) + self._rows * sum(counts)])

    def _order(self, places: Sequence[float], gains: Sequence[float]) -> list[int]:
        return drop_order(places, gains)[: len(places) * (self._levels - 1)]


def _seconds_of(most: int, seconds: Mapping[int, float] | None) -> list[float]:
    """Return the seconds of a forward of 0, 1, ... ``most`` rows: interpolated, then prohibitive."""
    if seconds is None:
        return [1.0] * (most + 1)
    known = sorted(seconds)
    times = np.interp(range(most + 1), known, [seconds[count] for count in known])
    beyond = np.maximum(np.arange(most + 1) - known[-1], 0)
    return (times * np.where(beyond, _NEVER * beyond, 1.0)).tolist()
