"""Which rounds an engine spends its time in, by the domains of the drafters that could draft in them."""

from __future__ import annotations

import math

from osd.engine.round import Outcome
from osd.metrics import RoundShare
from osd.speculation.cost_model import CostModel, bucket

WINDOW_SECONDS = 300.0
"""Of the past that a share is taken over, the nearest the most."""

_LEAST = 1e-4  # share below which a kind of round is forgotten

_Kind = tuple[str, int, int]  # domain, streams, rows of prompts


class RoundMix:
    """The share of time in each kind of round, whether something was drafted in it or not.

    A round belongs to the domains of its sequences by their number. Sequences that asked not to be drafted for belong
    to none: no drafter could save them anything.
    """

    def __init__(self, now: float) -> None:
        """Begin at ``now``, in seconds of the clock that all later calls give."""
        self._at, self._window = now, 0.0
        self._seconds: dict[_Kind, float] = {}
        self._new: dict[_Kind, float] = {}
        self._drafters: dict[str, str] = {}

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Take in a round of so many seconds."""
        streams = len(outcome.sequences)
        prompts = bucket(outcome.plain_rows - streams)
        for one in outcome.sequences:
            if (drafter := one.sequence.drafter) is not None:
                kind = drafter.domain, streams, prompts
                self._new[kind] = self._new.get(kind, 0.0) + seconds / streams
                self._drafters[drafter.domain] = drafter.kind

    def shares(self, now: float, costs: CostModel, depth: int) -> dict[str, list[RoundShare]]:
        """By domain what its sequences spend their time in, with chains of up to ``depth`` tokens at present costs."""
        kept = math.exp(-(now - self._at) / WINDOW_SECONDS)
        self._window = kept * self._window + WINDOW_SECONDS * (1 - kept)
        for kind in self._seconds.keys() | self._new.keys():
            self._seconds[kind] = kept * self._seconds.get(kind, 0.0) + self._new.get(kind, 0.0)
            if self._seconds[kind] < _LEAST * self._window:
                del self._seconds[kind]
        self._at = now
        self._new.clear()
        found: dict[str, list[RoundShare]] = {}
        for (domain, streams, prompts), spent in sorted(self._seconds.items()):
            seconds = _chains(costs, self._drafters[domain], streams, prompts, depth)
            share = spent / max(self._window, spent)  # a clock that stood still
            found.setdefault(domain, []).append(RoundShare(streams, prompts, share, seconds))
        return found


def _chains(costs: CostModel, drafter: str, streams: int, prompts: int, depth: int) -> tuple[float, ...]:
    """Seconds of a round in which each stream drafts 0, 1, 2, ... tokens."""
    drafting = (
        costs.round(prompts + streams * (1 + nodes)) + costs.proposal(drafter, streams, nodes)
        for nodes in range(1, depth + 1)
    )
    return costs.plain_round(prompts + streams), *drafting
