"""Speed-up of drafting over plain decoding at the same load, measured in trials.

A trial is a short block of decoding steps without drafting, between two blocks with drafting, or the reverse. The
speed-up is the time that plain decoding would take for the same tokens and prompts, with as many streams
in each step, over the time taken:

    S = sum [P(n, p) + (k / n - 1) P(n, 0)] / sum T

T are the seconds of a step, n its streams (sequences that draw a token), p its rows of prompts and k its tokens.
Tokens are counted. Seconds are modelled by two factors: the cost of a step by its streams and prompt rows, and the
speed of the machine around each trial. Blocks of plain decoding have more streams and more prompts per token than the
steps around them: a comparison of tokens per second would be biased.

Switchback experiments: Bojinov, Simchi-Levi and Zhao, "Design and analysis of switchback experiments", Management
Science 69(7), 2023; Hu and Wager, "Switchback experiments under geometric mixing", arXiv 2209.00197.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_TRIALS = 12
"""Trials before which no interval is reported: a jackknife of fewer is too narrow."""

RISK = 0.05
"""Probability that an interval is ever wrong, however often it is evaluated."""

LEAST_EFFECT = 0.02
"""Logarithm of the least speed-up that matters: there, a confidence sequence is narrowest."""

KNOWN_WIDTH = LEAST_EFFECT / 2
"""Half an interval, below which an effect is known well enough."""

_TURNS = 5  # of a fit, costs given speeds and speeds given costs; the last changed a simulated logarithm by < 1e-6
_RIDGE = 1e-4  # weight of a penalty for costs of what hardly varies, such as the streams of a single client

SUMS = 10
"""Sums over steps: seven covariates of their seconds, plain steps for the same tokens, tokens, and seconds.

The covariates are steps, streams, prompt rows, streams up to 4, streams up to 12, steps with prompts, and draft rows;
plain steps are linear in the first three.
"""

STEPS, TOKENS, SECONDS = 0, 8, 9
_PLAIN, _COVARIATES = 3, 7
_WORK = [7, 8, 2]  # of plain decoding for the same tokens and prompts: steps, streams, prompt rows

BLOCK = 16
"""Steps of a block. The speed of a virtual machine changes within a second, so a longer block meets another speed than
the steps around it."""

CELL = 4
"""Steps of one observation of a fit, and uncounted steps after drafting stops, while caches are cold."""

TRIAL = (1 + 3 * BLOCK // CELL, SUMS)
"""Shape of a trial: sums since the trial before, and over each cell of the block before, the block, and the block after
it."""

WHOLE_BLOCK = [*range(1 + BLOCK // CELL, 1 + 2 * BLOCK // CELL)]
"""Cells of the block."""

PLAIN_BLOCK, DRAFTED_BLOCK = WHOLE_BLOCK[1:], WHOLE_BLOCK[2:]
"""Counted cells of a block without drafting, and with drafting.

When drafting begins, two cells do not count. Drafters read tokens that they missed, and the first drafts are better
than usual: plain decoding takes as many steps as tokens, so it more often stops where the next tokens are predictable.
"""

AROUND = [*range(1, WHOLE_BLOCK[0]), *range(WHOLE_BLOCK[-1] + 3, TRIAL[0])]
"""Counted cells before and after the block."""


@dataclass(frozen=True)
class Step:
    """Decoding step: its seconds, sequences that drew a token, rows of prompts, tokens drawn, and rows of drafts."""

    seconds: float
    streams: int
    prompt_rows: int
    tokens: int
    draft_rows: int = 0

    def sums(self) -> np.ndarray:
        """Return the addends of ``SUMS``."""
        n, p = self.streams, self.prompt_rows
        plain = self.tokens / n if n else 1.0
        return np.array([1.0, n, p, min(n, 4), min(n, 12), p > 0, self.draft_rows, plain, plain * n, self.seconds])


@dataclass(frozen=True)
class Effect:
    """Logarithm of a speed-up: of drafting over plain decoding, or of a candidate over the stable version.

    Attributes:
        log: the estimate.
        error: its standard error.
        trials: number of trials, or of pairs of blocks, in the estimate.
    """

    log: float
    error: float
    trials: int

    @property
    def width(self) -> float:
        """Half the width of the interval of the logarithm; infinite before ``LEAST_TRIALS``."""
        return math.inf if self.trials < LEAST_TRIALS else sequence_width(self.error, RISK, LEAST_EFFECT)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the speed-up, as ratios."""
        return math.exp(self.log - self.width), math.exp(min(self.log + self.width, 700.0))

    @property
    def percent(self) -> str:
        """Change of speed with its interval, in percent, as text."""
        low, high = self.interval
        bounds = f" ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})" if math.isfinite(self.width) else ""
        return f"{100 * math.expm1(self.log):+.1f}%{bounds}"


def sequence_width(error: float, risk: float, effect: float) -> float:
    """Return half the width of a confidence sequence, which is narrowest for estimates of ``effect``.

    With a probability of 1 - ``risk`` the interval holds the true value at all evaluations together: Robbins' normal
    mixture (1970). ``error`` is the standard error of the estimate.
    """
    variance, prior = error**2, effect**2
    factor = 2 * math.log(1 / risk) + math.log1p(prior / max(variance, 1e-12))
    return math.sqrt(variance * (1 + variance / prior) * factor)


def bounds(log: float | None, width: float | None) -> dict[str, float]:
    """Return a measured ratio and the bounds of its interval, from logarithms; empty before it is known."""
    if log is None or width is None:
        return {}
    return {"estimate": math.exp(log), "low": math.exp(log - width), "high": math.exp(log + width)}


def estimate(trials: Sequence[np.ndarray]) -> tuple[Effect, np.ndarray, float] | None:
    """Estimate the speed-up of drafting and the costs of plain steps, from trials with plain decoding inside the block.

    Returns:
        The effect; the seconds [3] of a plain step, of each of its streams and of each of its prompt rows, on a machine
        of average speed; and the seconds of the steps with drafting. None for fewer than two trials.
    """
    if len(trials) < 2:
        return None
    cells = np.array(trials)
    costs, speeds = _two_factors(cells[:, AROUND])
    gram, moments = _equations(cells[:, PLAIN_BLOCK], _PLAIN)
    plain = ridge(without_each(gram), without_each(moments / speeds[:, None]), len(trials))
    # All drafted steps count. Only the costs of plain steps are estimated from the trials.
    drafted = cells[:, [0, *AROUND]].sum((0, 1))
    effect = jackknife(log_ratio(plain @ drafted[_WORK], drafted[:_COVARIATES] @ costs))
    return Effect(*effect, len(trials)), plain[0], float(drafted[SECONDS])


def plain_log(costs: np.ndarray, drafted: np.ndarray) -> float:
    """Return the natural logarithm of the speed-up over plain decoding in the steps that ``drafted`` sums.

    ``costs`` [3] of plain steps hold for a machine of average speed.
    """
    return float(log_ratio(costs @ drafted[_WORK], drafted[SECONDS]))


def trial_log(costs: np.ndarray, plain: np.ndarray, drafted: np.ndarray) -> float:
    """Return the natural logarithm of the speed-up in the steps that ``drafted`` sums.

    The ``plain`` steps of a trial show the speed of the machine around it.
    """
    return plain_log(costs, drafted) + float(log_ratio(plain[SECONDS], costs @ plain[:_PLAIN]))


def compare(pairs: np.ndarray, costs: np.ndarray | None, count: int) -> Effect | None:
    """Estimate the logarithm of the ratio of the speed-ups of two versions, the candidate's over the stable version's.

    Both blocks of a pair meet the same machine and about the same streams, so that only tokens and seconds differ.

    Args:
        pairs: [n, 2, SUMS] of neighbouring blocks, the candidate's first.
        costs: [3] of plain steps. None fits them to the seconds of the same blocks, which cost more than plain steps,
            but in about the same proportion. Without a cost of prompts an effect of 5% takes five times as long to
            detect.
        count: pairs of blocks in these sums.

    Returns:
        None for fewer than two pairs.
    """
    if len(pairs) < 2:
        return None
    if costs is None:
        gram, moments = _equations(pairs.reshape(1, -1, SUMS), _PLAIN)
        costs = np.maximum(ridge(gram[0], moments[0], len(pairs)), 0.0)
    logs = log_ratio(without_each(pairs[..., _WORK]) @ costs, without_each(pairs[..., SECONDS]))
    return Effect(*jackknife(logs[:, 0] - logs[:, 1]), count)


def log_ratio(plain: Any, drafted: Any) -> Any:
    """Return the logarithm of a ratio of seconds; costs fitted to few steps can be negative."""
    return np.log(np.maximum(plain, 1e-9) / np.maximum(drafted, 1e-9))


def without_each(values: np.ndarray) -> np.ndarray:
    """Return [1 + n, ...] the sum of ``values`` [n, ...], and the sums without each of them."""
    total = values.sum(0, keepdims=True)
    return np.concatenate([total, total - values])


def jackknife(estimates: np.ndarray) -> tuple[float, float]:
    """Return an estimate and its standard error, given the estimates [1 + n] from ``without_each`` observation."""
    without, count = estimates[1:], len(estimates) - 1
    return float(estimates[0]), float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))


def ridge(gram: np.ndarray, moments: np.ndarray, count: int) -> np.ndarray:
    """Return the coefficients of a fit to ``count`` observations, by its normal equations."""
    penalty = _RIDGE / count * np.diagonal(gram, axis1=-2, axis2=-1) + 1e-9
    return np.linalg.solve(gram + penalty[..., None] * np.eye(gram.shape[-1]), moments[..., None])[..., 0]


def _two_factors(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of each covariate, and the slowness of the machine around each trial, 1 on average.

    ``cells`` [trials, cells, SUMS] are of steps with drafting.
    """
    gram, moments = _equations(cells, _COVARIATES)
    sums, speeds = cells.sum(1), np.ones(len(cells))
    costs = np.zeros(_COVARIATES)
    for _ in range(_TURNS):
        costs = ridge(gram.sum(0), (moments / speeds[:, None]).sum(0), len(cells))
        fitted = np.maximum(sums[:, :_COVARIATES] @ costs, 1e-12)
        speeds = sums[:, SECONDS] / fitted * fitted.sum() / sums[:, SECONDS].sum()
    return costs, speeds


def _equations(cells: np.ndarray, covariates: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the normal equations of each trial [trials, ...] for the first ``covariates``."""
    x = cells[..., :covariates]
    return np.swapaxes(x, 1, 2) @ x, np.einsum("tki,tk->ti", x, cells[..., SECONDS])
