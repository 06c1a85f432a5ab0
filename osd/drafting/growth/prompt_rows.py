"""Number of prompt tokens behind each node of a draft.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). If the output continues behind a node with c prompt tokens, the next draft may be c
tokens deep: c is the state of the next step. F_c is the expected number of accepted tokens in state c. If the output
continues behind a node with probability pc, its last prompt token is worth ``pc (F_c - F_(c-1))``.
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
"""Probability that a candidate is right after a right path, by depth and then by rank."""

_MOST_TURNS = 8
"""Most improvements of a plan; two or three suffice."""

_LEAST = 0.01
"""Least value of a prompt token, in tokens, where it has to pay."""

_NEVER = 1e6
"""Factor of the longest measured forward, for each row beyond its size."""


def kept_shares(parents: Sequence[int], table: Table) -> list[float]:
    """Return the probability that each node of a draft is kept, by the ranks on its path; 0 outside the ``table``."""
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
    """Return the probability that the kept path ends at the root and at each node; ``shares`` are those of nodes."""
    found = [1.0, *shares]
    for parent, share in zip(parents, shares, strict=True):
        found[1 + parent] -= share
    return [max(0.0, share) for share in found]


def expected_accepted(table: Table, nodes: int, price: float = 0.0) -> list[float]:
    """Return F_0, F_1, ...: accepted tokens of the best drafts of 0, 1, ... levels and ``nodes`` nodes.

    With a ``price`` of each node they are reduced by it, and have only nodes that are worth it.
    """
    return [
        sum(max(0.0, share - price) for _, share in best_paths(table[:levels], nodes))
        for levels in range(len(table) + 1)
    ]


def drop_order(places: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return the places of prompt tokens in the order of their removal: the smallest loss first, then the last place.

    No place loses its only one as long as another has two.

    Args:
        places: probability that the path ends at the root and at each node, of which each has n at first.
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
    """Return the prompt tokens of the root and each node if all have ``most`` together; see ``drop_order``."""
    counts = [len(gains) - 1] * len(places)
    for place in drop_order(places, gains)[: max(0, sum(counts) - most)]:
        counts[place] -= 1
    return counts


def paying(
    places: Sequence[Sequence[float]], gains: Sequence[float], most: Sequence[int], copies: int, budget: StepBudget
) -> list[list[int]]:
    """Return the prompt tokens of each place if all together have to be worth the time of their rows.

    Those of the largest value for a row come first, of all sequences of the step. The number with the largest total
    value rides: the cost of rows rises in steps, so that one row may be free where three are not.

    Args:
        places: by sequence, the probability that the path ends at the root and at each node.
        gains: F_0 to F_n.
        most: most prompt tokens of each sequence.
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
    """Return steps (from, to, gain) from 0 on as long as they gain, each to the largest gain for a prompt token."""
    found, at = [], 0
    while at < len(gains) - 1:
        to = max(range(at + 1, len(gains)), key=lambda count: (gains[count] - gains[at]) / (count - at))
        if gains[to] <= gains[at]:
            break
        found.append((at, to, gains[to] - gains[at]))
        at = to
    return found


def stationary(moves: Sequence[Sequence[float]]) -> list[float]:
    """Return the long-run probability of each state; ``moves[d][c]`` is the probability that c follows d."""
    count = len(moves)
    equations = np.vstack([np.array(moves).T - np.eye(count), np.ones(count)])
    found = np.linalg.lstsq(equations, np.append(np.zeros(count), 1.0), rcond=None)[0]
    return np.clip(found, 0.0, 1.0).tolist()


@dataclass(frozen=True)
class StatePlan:
    """Step in one state: the ``paths`` of its draft, its prompt tokens, and its expected outcome.

    ``moves`` [n + 1] are the probabilities of the next state, ``accepted`` the accepted tokens, and ``seconds`` the
    time of the forward.
    """

    paths: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    accepted: float
    moves: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Steps in the states 0 to n, and the tokens per second that they give in the long run."""

    states: tuple[StatePlan, ...]
    speed: float


def best_plan(table: Table, budget: int, levels: int, rows: int, seconds: Mapping[int, float] | None) -> Plan:
    """Return the drafts of all states that together give the most tokens per second.

    That is ``sum_d pi_d (1 + F_d) / sum_d pi_d L_d`` with the stationary law pi. Each state takes the best paths of its
    depth, and loses prompt tokens in the order of ``drop_order``, no place its only one. The numbers of both are
    improved state by state until nothing gets better (policy iteration, Howard 1960). The paper tries sizes on a grid.

    Args:
        table: of the drafter's candidates.
        budget: most nodes of a draft.
        levels: most prompt tokens of a node, n.
        rows: of each of them in a forward.
        seconds: of a forward by its rows; None without a bound. No larger size is taken, except for the smallest draft.
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
    """Choices in a state: the best paths of each number, and the prompt tokens behind them."""

    def __init__(self, table: Table, budget: int, levels: int, rows: int, took: Sequence[float]) -> None:
        """Prepare the state of as many levels as ``table`` has; ``took`` are the seconds of a forward by rows."""
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
        """Return the best choice if ``after`` are the values of the states, and ``speed`` is that of a second."""
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
    """Return the seconds of a forward of 0, 1, ... ``most`` rows: interpolated, and far too many beyond."""
    if seconds is None:
        return [1.0] * (most + 1)
    known = sorted(seconds)
    found = np.interp(range(most + 1), known, [seconds[count] for count in known])
    beyond = np.maximum(np.arange(most + 1) - known[-1], 0)
    return (found * np.where(beyond, _NEVER * beyond, 1.0)).tolist()
