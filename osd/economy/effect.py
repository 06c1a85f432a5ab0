"""Speed-up of drafting over plain decoding at the same load, measured in trials.

A trial is a short block of decoding steps without drafting, in the middle of a block with drafting, or the reverse. The
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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CELL = 8
"""Steps whose sums are one observation of a fit."""

LEAST_TRIALS = 12
"""Trials before which no interval is reported: a jackknife of fewer is too narrow."""

RISK = 0.05
"""Probability that an interval is ever wrong, however often it is evaluated."""

_EFFECT = 0.02  # logarithm of the speed-up for which the confidence sequence is narrowest
_TURNS = 4  # of the fit: costs given the machine's speed, and its speed given the costs
_PLAIN = np.array([0, 1, 4])  # of the covariates below: plain steps are linear in streams and prompt rows
_COVARIATES = 6


@dataclass(frozen=True)
class Step:
    """Decoding step of an engine: its seconds, sequences that drew a token, rows of prompts, and tokens drawn."""

    seconds: float
    streams: int
    prompt_rows: int
    tokens: int


class Totals:
    """Sums over steps: seconds, covariates of the seconds, and the same work in plain steps.

    Attributes:
        covariates: [6] the seconds of a step are piecewise linear in its streams, and linear in its prompt rows.
        work: [3] plain steps for the same tokens and prompts: their number, streams and prompt rows.
    """

    def __init__(self) -> None:
        self.covariates, self.work, self.seconds = [0.0] * _COVARIATES, [0.0] * 3, 0.0

    @property
    def tokens(self) -> float:
        """Number of drawn tokens."""
        return self.work[1]

    def add(self, step: Step) -> None:
        """Add the seconds, the covariates and the plain work of a step."""
        n, p = step.streams, step.prompt_rows
        plain = step.tokens / n if n else 1.0
        for sums, values in (
            (self.covariates, (1, n, min(n, 4), min(n, 12), p, p > 0)),
            (self.work, (plain, plain * n, p)),
        ):
            for place, value in enumerate(values):
                sums[place] += value
        self.seconds += step.seconds

    def add_totals(self, totals: Totals) -> None:
        """Add the sums over other steps."""
        self.covariates = [a + b for a, b in zip(self.covariates, totals.covariates, strict=True)]
        self.work = [a + b for a, b in zip(self.work, totals.work, strict=True)]
        self.seconds += totals.seconds


class Sums(Totals):
    """Totals over whole cells of steps, and the normal equations of a fit over these cells."""

    def __init__(self) -> None:
        super().__init__()
        self.gram, self.moments = np.zeros((_COVARIATES, _COVARIATES)), np.zeros(_COVARIATES)
        self._cell, self._steps = Totals(), 0

    def add(self, step: Step) -> None:
        """Add a step; it counts when its cell is full."""
        self._cell.add(step)
        self._steps += 1
        if self._steps == CELL:
            x = np.array(self._cell.covariates)
            self.gram += np.outer(x, x)
            self.moments += self._cell.seconds * x
            self.add_totals(self._cell)
            self._cell, self._steps = Totals(), 0


@dataclass
class Trial:
    """Sums over the steps ``inside`` the block, ``around`` it, and of the outer arm ``since`` the trial before."""

    inside: Sums = field(default_factory=Sums)
    around: Sums = field(default_factory=Sums)
    since: Totals = field(default_factory=Totals)


@dataclass
class Pair:
    """Sums over two neighbouring blocks of steps, each with another version.

    Attributes:
        candidate: steps in which the candidate drafts.
        stable: steps in which the stable version drafts.
        count: pairs of blocks in the sums.
    """

    candidate: Totals = field(default_factory=Totals)
    stable: Totals = field(default_factory=Totals)
    count: int = 1

    def add(self, pair: Pair) -> None:
        """Add the sums and the count of another pair."""
        self.candidate.add_totals(pair.candidate)
        self.stable.add_totals(pair.stable)
        self.count += pair.count


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
        """Half the width of the interval of the logarithm; infinite before ``LEAST_TRIALS``.

        With a probability of 1 - ``RISK`` the interval holds the true value at all evaluations together: Robbins'
        normal mixture (1970).
        """
        if self.trials < LEAST_TRIALS:
            return math.inf
        variance, prior = self.error**2, _EFFECT**2
        factor = 2 * math.log(1 / RISK) + math.log1p(prior / max(variance, 1e-12))
        return math.sqrt(variance * (1 + variance / prior) * factor)

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


def bounds(log: float | None, width: float | None) -> dict[str, float]:
    """Return a measured ratio and the bounds of its interval, from logarithms; empty before it is known."""
    if log is None or width is None:
        return {}
    return {"estimate": math.exp(log), "low": math.exp(log - width), "high": math.exp(log + width)}


@dataclass(frozen=True)
class PlainCosts:
    """Costs of plain decoding on a machine of average speed.

    Attributes:
        seconds: [3] seconds of a plain step, of each of its streams and of each of its prompt rows.
    """

    seconds: np.ndarray

    def unpaired_log(self, drafted: Totals) -> float:
        """Return the natural logarithm of the speed-up over plain decoding in the steps that ``drafted`` sums.

        No plain steps around the same time are used: the machine is assumed to have its average speed.
        """
        return _log(self.seconds @ drafted.work, drafted.seconds)

    def trial_log(self, trial: Trial, plain_inside: bool) -> float:
        """Return the natural logarithm of the speed-up that a single trial measured."""
        plain, drafted = (trial.inside, trial.around) if plain_inside else (trial.around, trial.inside)
        slower = _log(
            plain.seconds, self.seconds @ np.array(plain.covariates)[_PLAIN]
        )  # the machine, around this trial
        return slower + self.unpaired_log(drafted)


def estimate(trials: Sequence[Trial], plain_inside: bool) -> tuple[Effect, PlainCosts] | None:
    """Estimate the speed-up of drafting over plain decoding, and the costs of plain steps.

    Args:
        trials: with plain decoding inside the block and drafting around it, or the reverse.
        plain_inside: whether plain decoding is inside the block.

    Returns:
        None for fewer than two trials.
    """
    if len(trials) < 2:
        return None
    around = _Side([trial.around for trial in trials], plain=not plain_inside)
    inside = _Side([trial.inside for trial in trials], plain=plain_inside)
    costs_around, speeds = around.costs_and_speeds()
    costs_inside, without = inside.costs(speeds), inside.costs_without_each(speeds)
    if plain_inside:
        # All drafted steps count. Only the costs of plain steps are estimated from the trials.
        work = np.sum([trial.since.work for trial in trials], 0)
        took = float(np.sum([trial.since.covariates for trial in trials], 0) @ costs_around)
        log, logs = _log(costs_inside @ work, took), _log(without @ work, took)
    else:
        work = np.array([trial.inside.work for trial in trials])
        seconds = np.array([trial.inside.seconds for trial in trials]) / speeds
        log = _log(costs_around @ work.sum(0), seconds.sum())
        logs = _log((work.sum(0) - work) @ costs_around, seconds.sum() - seconds)
    costs = PlainCosts(costs_inside if plain_inside else costs_around)
    return Effect(float(log), jackknife(logs), len(trials)), costs


def compare(pairs: Sequence[Pair], costs: PlainCosts | None) -> Effect | None:
    """Estimate the logarithm of the ratio of the speed-ups of two versions, the candidate's over the stable version's.

    Both blocks of a pair meet the same machine and about the same streams, so that only tokens and seconds differ.

    Args:
        pairs: neighbouring blocks of both versions.
        costs: prices of the work. None fits prices to the seconds of the same blocks, which cost more than plain steps,
            but in about the same proportion. Without a price for prompts an effect of 5% takes five times as long to
            detect.

    Returns:
        None for fewer than two pairs.
    """
    if len(pairs) < 2:
        return None
    work = np.array([(pair.candidate.work, pair.stable.work) for pair in pairs])
    seconds = np.array([(pair.candidate.seconds, pair.stable.seconds) for pair in pairs])
    if costs is None:
        covariates = np.array([(pair.candidate.covariates, pair.stable.covariates) for pair in pairs])[..., _PLAIN]
        rows = covariates.reshape(-1, len(_PLAIN))
        costs = PlainCosts(np.maximum(_solve(rows.T @ rows, rows.T @ seconds.reshape(-1), len(pairs)), 0.0))
    work = work @ costs.seconds

    def ratio(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        speeds = _log(work, seconds)
        return speeds[..., 0] - speeds[..., 1]

    log = ratio(work.sum(0), seconds.sum(0))
    without = ratio(work.sum(0) - work, seconds.sum(0) - seconds)
    return Effect(float(log), jackknife(without), sum(pair.count for pair in pairs))


def _log(plain: Any, drafted: Any) -> Any:
    """Return the logarithm of a ratio of seconds; costs fitted to few steps can be negative."""
    return np.log(np.maximum(plain, 1e-9) / np.maximum(drafted, 1e-9))


def jackknife(without: np.ndarray) -> float:
    """Return the standard error of an estimate, given the estimates ``without`` each of its observations."""
    count = len(without)
    return float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))


class _Side:
    """Costs of the steps of one arm, over all trials."""

    def __init__(self, sums: Sequence[Sums], plain: bool) -> None:
        chosen = _PLAIN if plain else np.arange(_COVARIATES)
        self._gram = np.array([total.gram[np.ix_(chosen, chosen)] for total in sums])
        self._moments = np.array([total.moments[chosen] for total in sums])
        self._covariates = np.array([total.covariates for total in sums])[:, chosen]
        self._seconds = np.array([total.seconds for total in sums])

    def costs_and_speeds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of each covariate, and the slowness of the machine around each trial, 1 on average."""
        speeds = np.ones(len(self._seconds))
        costs = self.costs(speeds)
        for _ in range(_TURNS):
            fitted = np.maximum(self._covariates @ costs, 1e-12)
            speeds = self._seconds / fitted
            speeds /= self._seconds.sum() / fitted.sum()
            costs = self.costs(speeds)
        return costs, speeds

    def costs(self, speeds: np.ndarray) -> np.ndarray:
        """Return the seconds of each covariate, given the ``speeds`` of ``costs_and_speeds``."""
        return _solve(self._gram.sum(0), (self._moments / speeds[:, None]).sum(0), len(speeds))

    def costs_without_each(self, speeds: np.ndarray) -> np.ndarray:
        """Return ``costs`` [trials, covariates] without each of the trials."""
        moments = self._moments / speeds[:, None]
        return _solve(self._gram.sum(0) - self._gram, moments.sum(0) - moments, len(speeds))


def _solve(gram: np.ndarray, moments: np.ndarray, trials: int) -> np.ndarray:
    """Return ridge coefficients: covariates that hardly vary, such as the streams of one client, must not explode."""
    diagonal = np.diagonal(gram, axis1=-2, axis2=-1)
    ridge = 1e-4 / trials * diagonal + 1e-9
    return np.linalg.solve(gram + ridge[..., None] * np.eye(gram.shape[-1]), moments[..., None])[..., 0]
