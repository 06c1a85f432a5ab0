"""Gate: a drafter is published only if it is not worse than the version in service."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch
from osd.learning.evaluation import Evaluation, GateFigures, Scorer, weighted_mean

TOLERANCE = 0.005
"""Maximum drop of acceptance that counts as noise, even if the standard error is larger."""


MIN_POSITIONS = 256
"""Minimum number of held-out positions for a decision."""


@dataclass(frozen=True)
class GateDecision:
    """Decision of the gate.

    Attributes:
        passed: whether the candidate may be published.
        waits: whether the gate made no decision because too few positions are held out.
        reason: a line for users.
        candidate: figures of the candidate; None without an evaluation.
        baseline: figures of the version in service; None without an evaluation.
        error: standard error of the difference in acceptance per position.
    """

    passed: bool
    waits: bool
    reason: str
    candidate: GateFigures | None = None
    baseline: GateFigures | None = None
    error: float = 0.0

    @property
    def log_gain(self) -> float | None:
        """Logarithm of the gain in tokens per decoding step, with recall; None without a decision."""
        if self.candidate is None or self.baseline is None:
            return None
        log = math.log(self.candidate.length_with_recall / self.baseline.length_with_recall)
        return log if math.isfinite(log) else None

    def with_least_gain(self, least: float) -> GateDecision:
        """Return a rejection if the candidate passed with a smaller ``log_gain`` than ``least``, else this decision."""
        if not self.passed or self.log_gain is None or self.log_gain >= least:
            return self
        return replace(self, passed=False, reason=f"{self.reason}, less than {math.expm1(least):.0%} more in service")

    def figures(self) -> dict[str, Any]:
        """Return both sets of figures as JSON values; names of the baseline's begin with ``baseline_``."""
        figures = self.candidate.summary() if self.candidate else {}
        if self.baseline:
            figures |= {f"baseline_{name}": value for name, value in self.baseline.summary().items()}
        return figures


@dataclass(frozen=True)
class Gate:
    """Comparison of a candidate with the version in service on the same held-out positions.

    A candidate passes under three conditions. All weights are finite. Its acceptance per position is not lower by more
    than a tolerance: one standard error of the paired difference over sequences, at most 0.005. Its expected tokens per
    decoding step are not lower by more than ``depth`` times this tolerance. Both drafters are of the same kind and
    size, so steps have equal cost, and tokens per step rank them as tokens per second do.

    Attributes:
        depth: the number of draft tokens per decoding step.
        divergence: the name of the divergence to report; it does not affect the decision.
        min_positions: the minimum number of held-out positions for a decision.
    """

    depth: int
    divergence: str
    min_positions: int = MIN_POSITIONS

    def judge(
        self, candidate: Trainable, baseline: Trainable | Scorer, batches: Callable[[], Iterable[DistillBatch]]
    ) -> GateDecision:
        """Evaluate candidate and baseline, and decide.

        Both drafters are evaluated on each batch before the next batch is read. With enough positions, the evaluation
        ends early when a sequential test (``PairedTest``) is clear and the figures so far agree with it.

        Args:
            candidate: the drafter to publish.
            baseline: the drafter in service, or its scorer with the gate's depth and divergence.
            batches: returns an iterator over the held-out batches.
        """
        for name, weight in candidate.weights().items():
            if not torch.isfinite(weight).all():
                return GateDecision(False, False, f"weight {name} has values that are not finite")
        first, second = (
            Evaluation(drafter if isinstance(drafter, Scorer) else Scorer(drafter, self.depth, self.divergence))
            for drafter in (candidate, baseline)
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

    def evaluate(self, scorer: Scorer, batches: Iterable[DistillBatch]) -> GateFigures | None:
        """Return the figures of one drafter by its scorer, or None when too few positions are held out."""
        figures = Evaluation(scorer).over(batches)
        return figures if figures.positions >= self.min_positions else None

    def decide(self, candidate: GateFigures, baseline: GateFigures) -> GateDecision:
        """Return the decision from the figures of both drafters at the same positions.

        It compares only acceptance and expected tokens. ``judge`` refuses weights that are not finite, and waits for
        ``min_positions``.
        """
        error = _standard_error(candidate.overlaps - baseline.overlaps, candidate)
        tolerance = min(error, TOLERANCE)
        difference = weighted_mean(candidate.overlaps - baseline.overlaps, candidate.trace_weight)
        # NaN must not pass, so the comparisons are negated.
        if not difference >= -tolerance:
            reason = f"held-out acceptance per position fell by {-difference:.4f}"
            return GateDecision(False, False, reason, candidate, baseline, error)
        if not candidate.expected_length >= baseline.expected_length - self.depth * tolerance:
            reason = (
                f"expected tokens per step fell from {baseline.expected_length:.3f} to {candidate.expected_length:.3f}"
            )
            return GateDecision(False, False, reason, candidate, baseline, error)
        reason = f"expected tokens per step {baseline.expected_length:.3f} -> {candidate.expected_length:.3f}"
        return GateDecision(True, False, reason, candidate, baseline, error)


def _standard_error(difference: Tensor, figures: GateFigures) -> float:
    """Return the standard error of the mean ``difference`` per position.

    Positions of one sequence are not independent, so a sequence counts as one observation.
    """
    trace_weight = figures.trace_weight
    spread = difference - weighted_mean(difference, trace_weight)
    if trace_weight is not None:
        spread = spread * trace_weight
    sequences = int(figures.groups.max()) + 1
    per_sequence = torch.zeros(sequences, dtype=torch.float64).index_add_(0, figures.groups, spread)
    return float(per_sequence.square().sum().sqrt() / (len(difference) if trace_weight is None else trace_weight.sum()))


ERROR = 0.05
"""Maximum probability, over any number of looks, that the test calls a side better that is not."""

_BETS = np.array([0.05, 0.1, 0.2, 0.4, 0.8])


class PairedTest:
    """Sequential test of pairs with differences between -1 and 1, by betting on either side.

    If the first side is not better, each difference has a mean of at most 0 given the earlier ones. Then the expected
    wealth of a gambler who bets a share b on each difference, ``prod(1 + b d)``, never grows. The same holds for the
    mean wealth over several b, which is an e-value. By Ville's inequality the mean wealth ever reaches 1 / 0.05 with a
    probability of at most 0.05. So the result may be checked after each pair. The same holds for the second side.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024 (arXiv 2010.09686).
    """

    def __init__(self) -> None:
        self._wealth = np.zeros((2, len(_BETS)))  # logarithms, by side and share

    def add(self, differences: Iterable[float]) -> None:
        """Add pairs, as the first side's value minus the second side's."""
        for difference in differences:
            self._wealth += np.log1p(np.outer([difference, -difference], _BETS))

    @property
    def better(self) -> Literal["first", "second"] | None:
        """Side that is better; None while the test is not clear, or when differences are NaN.

        The first side that the test names is the result: after more pairs the test may be unclear again.
        """
        evidence = np.exp(self._wealth).mean(1)
        if evidence[0] >= 1 / ERROR:
            return "first"
        return "second" if evidence[1] >= 1 / ERROR else None
