"""What training cost and what it saved, as a pass went on."""

from __future__ import annotations

import itertools

from benchmarks.adaptation.turn import Turn
from osd.simulation.bill import Account


def accounts(trained: Turn, untrained: Turn) -> list[Account]:
    """A pass with training beside one without, at each point of the first.

    Saved is what the engine took less for as many answered requests; what training takes from the rounds beside it is
    in there. The cost is what the trainer computed.
    """
    return [
        Account(point.seconds, point.training, trained.cores * (_busy(untrained, point.requests) - point.busy))
        for point in trained.curve
    ]


def _busy(turn: Turn, requests: float) -> float:
    """Seconds that the engine computed until so many requests were answered."""
    for one, two in itertools.pairwise(turn.curve):
        if requests <= two.requests:
            return one.busy + (two.busy - one.busy) * (requests - one.requests) / (two.requests - one.requests)
    return turn.end.busy
