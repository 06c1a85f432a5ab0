"""The gate: only a drafter that is not worse than the one in service may be published."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch
from osd.learning.evaluation import Evaluation, GateFigures, Scorer, weighted_mean

TOLERANCE = 0.005
"""Largest drop of acceptance that is taken for noise, however large the standard error."""


MIN_POSITIONS = 256
"""Held-out positions without which nothing is judged."""


@dataclass(frozen=True)
class GateDecision:
    """What the gate decided, with a ``reason`` of one line for people; figures are None where nothing was evaluated.

    ``waits`` says that the candidate was not judged, because too little was held out to judge by. ``error`` is one
    standard error of the difference in acceptance per position.
    """

    passed: bool
    waits: bool
    reason: str
    candidate: GateFigures | None = None
    baseline: GateFigures | None = None
    error: float = 0.0

    @property
    def log_gain(self) -> float | None:
        """Logarithm of the gain in tokens per round, beside recall; None where nothing was judged."""
        if self.candidate is None or self.baseline is None:
            return None
        log = math.log(self.candidate.length_beside_recall / self.baseline.length_beside_recall)
        return log if math.isfinite(log) else None

    def figures(self) -> dict[str, Any]:
        """Both sets of figures as JSON: the candidate's, and the baseline's named ``baseline_...``."""
        figures = self.candidate.summary() if self.candidate else {}
        if self.baseline:
            figures |= {f"baseline_{name}": value for name, value in self.baseline.summary().items()}
        return figures


@dataclass(frozen=True)
class Gate:
    """Compares a candidate with the version in service on the same held-out positions, ``min_positions`` at least.

    It passes when every weight is finite, its acceptance is not below (up to one standard error of the paired
    difference over sequences, and never more than 0.005), and neither are its expected tokens per second. Both are of
    the same kind and size, so that a round costs the same and tokens per second compare as tokens per round do: rounds
    of ``depth`` draft tokens. The ``divergence`` is only reported.
    """

    depth: int
    divergence: str
    min_positions: int = MIN_POSITIONS

    def judge(
        self, candidate: Trainable, baseline: Trainable | Scorer, batches: Callable[[], Iterable[DistillBatch]]
    ) -> GateDecision:
        """Evaluate both and decide; ``batches`` gives the held-out positions, as many as are asked for.

        The ``baseline`` may be the scorer of one, with the gate's depth and divergence.

        Both sides see a batch before the next one is asked for. With enough positions, the rest is left out as soon as
        a test that may be looked at after every record is clear (``PairedTest``), unless the figures so
        far contradict it.
        """
        for name, weight in candidate.weights().items():
            if not torch.isfinite(weight).all():
                return GateDecision(False, False, f"weight {name} has a number that is not finite")
        first, second = (
            Evaluation(one if isinstance(one, Scorer) else Scorer(one, self.depth, self.divergence))
            for one in (candidate, baseline)
        )
        test = PairedTest()
        for batch in batches():
            test.add((first.add(batch) - second.add(batch)).tolist())
            if test.better is not None and first.positions >= self.min_positions:
                decision = self.decide(first.figures(), second.figures())
                if decision.passed == (test.better == "first"):
                    return decision
        if first.positions < self.min_positions:
            reason = f"not enough held-out records: {first.positions} positions of {self.min_positions}"
            return GateDecision(False, True, reason, first.figures())
        return self.decide(first.figures(), second.figures())

    def look(self, scorer: Scorer, batches: Iterable[DistillBatch]) -> GateFigures | None:
        """The figures of one drafter by its scorer, None where too little is held out to judge by."""
        figures = Evaluation(scorer).over(batches)
        return figures if figures.positions >= self.min_positions else None

    def decide(self, candidate: GateFigures, baseline: GateFigures) -> GateDecision:
        """Compare figures of the same positions."""
        error = _standard_error(candidate.overlaps - baseline.overlaps, candidate)
        tolerance = min(error, TOLERANCE)
        difference = weighted_mean(candidate.overlaps - baseline.overlaps, candidate.stands_for)
        # Written so that a comparison with NaN fails.
        if not difference >= -tolerance:
            reason = f"held-out acceptance per position fell by {-difference:.4f}"
            return GateDecision(False, False, reason, candidate, baseline, error)
        if not candidate.expected_length >= baseline.expected_length - self.depth * tolerance:
            reason = (
                f"expected tokens per round fell from {baseline.expected_length:.3f} to {candidate.expected_length:.3f}"
            )
            return GateDecision(False, False, reason, candidate, baseline, error)
        reason = f"expected tokens per round {baseline.expected_length:.3f} -> {candidate.expected_length:.3f}"
        return GateDecision(True, False, reason, candidate, baseline, error)


def _standard_error(difference: Tensor, figures: GateFigures) -> float:
    """Of the mean ``difference`` per position of some figures.

    Positions of one sequence are one draw: they are not independent.
    """
    stands_for = figures.stands_for
    spread = difference - weighted_mean(difference, stands_for)
    if stands_for is not None:
        spread = spread * stands_for
    sequences = int(figures.groups.max()) + 1
    per_sequence = torch.zeros(sequences, dtype=torch.float64).index_add_(0, figures.groups, spread)
    return float(per_sequence.square().sum().sqrt() / (len(difference) if stands_for is None else stands_for.sum()))


ERROR = 0.05
"""Chance of ever saying that a side is better that is not, over all looks."""

_BETS = np.array([0.05, 0.1, 0.2, 0.4, 0.8])


class PairedTest:
    """Bets on the differences of pairs, each between -1 and 1, one gambler for either side.

    Where the first side is no better the differences have a mean of 0 at most, whatever came before, and the wealth
    of who bets a share b on each, ``prod(1 + b d)``, is expected never to grow. So does the mean wealth of several b,
    which is an e-value: by Ville's inequality it ever reaches 1 / 0.05 with a chance of at most 0.05.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024 (arXiv 2010.09686).
    """

    def __init__(self) -> None:
        self._wealth = np.zeros((2, len(_BETS)))  # logarithms

    def add(self, differences: Iterable[float]) -> None:
        """Take in pairs: the first side's value less the second's."""
        for difference in differences:
            self._wealth += np.log1p(np.outer([difference, -difference], _BETS))

    @property
    def better(self) -> Literal["first", "second"] | None:
        """Which side is better, None while that is not clear; figures that are no numbers make nothing clear."""
        evidence = np.exp(self._wealth).mean(1)
        if evidence[0] >= 1 / ERROR:
            return "first"
        return "second" if evidence[1] >= 1 / ERROR else None
