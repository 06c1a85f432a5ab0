"""Schedule of trials: random short blocks of decoding steps without drafting, or with drafting while it is off.

A plain block costs time when drafting is faster. A share of the busy seconds pays for it and is banked while no trial
runs. Trials follow each other while the interval of the speed-up is wide or the speed-up seems to have fallen, and are
rare otherwise. While drafting is off, the loss budget pays for the blocks with drafting.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from osd.economy.effect import CELL, Effect, PlainCosts, Step, Trial, estimate
from osd.economy.guard import LossBudget
from osd.economy.report import Measured

BANK_SECONDS = 10.0
"""Largest bank of seconds for measuring."""

BEGIN_SECONDS = 2.0
"""Bank of a replica that starts: the speed-up is known some minutes later."""

BLOCK = 64
"""Steps of a block."""

_WASHOUT = CELL  # uncounted steps after a switch, in which caches are cold and drafters catch up
_GAP = 16  # mean of the random number of steps before a trial
_WIDTH = 0.01  # half an interval, below which the speed-up is known well enough
_FALL = 0.05  # fall of the unpaired logarithm of the speed-up, after which a trial is due
_LOOK_SECONDS = 120.0  # busy, after which a trial is due in any case
_KEPT_SECONDS = 3600.0  # busy, for which a trial counts
_MOST_TRIALS = 400
_FEW, _SELDOM = 24, 4  # an estimate after each of the first trials, then after every fourth
_GUESS = 0.5  # cost of a plain block as a share of its seconds, before the first estimate


class Bank:
    """Bank of seconds that measuring may cost: a share of the busy seconds fills it.

    Attributes:
        seconds: content.
        spent: estimated seconds that measuring has cost.
    """

    def __init__(self, measure: float) -> None:
        """Add a share ``measure`` of the busy seconds."""
        self._measure = measure
        self.seconds, self.spent = BEGIN_SECONDS, 0.0

    def add(self, busy: float) -> None:
        """Add the share of ``busy`` seconds of the engine."""
        self.seconds = min(self.seconds + self._measure * busy, BANK_SECONDS)

    def spend(self, seconds: float) -> None:
        """Take out seconds that a measurement has cost; the content can become negative."""
        self.seconds -= seconds
        self.spent += seconds


class _Trials:
    """Trials of the last busy hour with the same arm inside the block, and their estimate."""

    def __init__(self, plain_inside: bool) -> None:
        self.plain_inside = plain_inside
        self.effect: Effect | None = None
        self.costs: PlainCosts | None = None
        self._kept: deque[tuple[float, Trial]] = deque()

    def add(self, trial: Trial, busy: float) -> None:
        self._kept.append((busy, trial))
        while len(self._kept) > _MOST_TRIALS or self._kept[0][0] < busy - _KEPT_SECONDS:
            self._kept.popleft()
        if len(self._kept) >= _FEW and len(self._kept) % _SELDOM:
            return
        if (estimated := estimate([trial for _, trial in self._kept], self.plain_inside)) is not None:
            self.effect, self.costs = estimated

    def measured(self, spent: float) -> Measured:
        """Return the effect as figures that add up over replicas."""
        if self.effect is None:
            return Measured(spent=spent, guarded=int(not self.plain_inside))
        drafted = sum((trial.since if self.plain_inside else trial.inside).seconds for _, trial in self._kept)
        plain = drafted * math.exp(self.effect.log)
        variance = (plain * self.effect.error) ** 2
        return Measured(self.effect.trials, drafted, plain, variance, spent, int(not self.plain_inside))


class Switchback:
    """Schedule of random blocks of decoding steps without drafting, or with drafting while ``budget`` forbids it.

    Time is busy seconds of the engine, the sum of its steps: no clock is read.

    Attributes:
        busy: seconds so far.
        bank: of measurements; comparisons of versions use it too.
        budget: loss budget of drafting.
        measured: the speed-up as of the last trial; another thread may read it.
    """

    def __init__(self, measure: float, max_loss: float, seed: int) -> None:
        """Spend at most a share ``measure`` of busy seconds on measuring, and lose at most ``max_loss`` by drafting."""
        self._max_loss, self._random = max_loss, np.random.default_rng(seed)
        self.busy, self.bank = 0.0, Bank(measure)
        self._trials = {True: _Trials(plain_inside=True), False: _Trials(plain_inside=False)}
        self.changed()

    def changed(self) -> None:
        """Give another drafter a new loss budget, and begin a trial as soon as possible.

        Trials of the last hour stay, because they measured the drafters of that hour.
        """
        self.budget = LossBudget(self._max_loss)
        self._trials[False] = _Trials(plain_inside=False)
        self._begin()
        self._began = -math.inf

    @property
    def costs(self) -> PlainCosts | None:
        """Costs of plain steps as of the last trial; None before the first estimate."""
        return self._trials[self.budget.allows].costs

    @property
    def drafts(self) -> bool:
        """Whether drafters draft in the next step."""
        return self._plain_inside != (BLOCK // 2 <= self._place < BLOCK // 2 + BLOCK)

    def observe(self, step: Step) -> None:
        """Add the decoding step that followed the last read of ``drafts``."""
        self.busy += step.seconds
        self.bank.add(step.seconds)
        self.budget.passed(step.seconds)
        trial, place, half = self._trial, self._place, BLOCK // 2
        inside = half <= place < half + BLOCK
        washout = half <= place < half + _WASHOUT or half + BLOCK <= place < half + BLOCK + _WASHOUT
        if inside and self._plain_inside:
            self.bank.spend(step.seconds * self._loss)
        if not washout:
            for sums in [trial.inside] if inside else [trial.since] if place < 0 else [trial.since, trial.around]:
                sums.add(step)
        if place != -1 or self._due:
            self._place += 1
        if self._place == 2 * BLOCK:
            self._end()

    def _begin(self) -> None:
        self.measured = self._trials[self.budget.allows].measured(self.bank.spent)
        self._plain_inside, self._trial, self._began = self.budget.allows, Trial(), self.busy
        self._place = -1 - int(self._random.exponential(_GAP))

    @property
    def _due(self) -> bool:
        """Whether the next trial begins now."""
        known, since = self._trials[self._plain_inside], self.busy - self._began
        if not self._trial.since.seconds:  # the cost of a block is unknown
            return False
        block = BLOCK * self._trial.since.seconds / self._trial.since.covariates[0]
        if not self._plain_inside:
            return self.budget.pays_for(block, since)
        if self.bank.seconds < block * self._loss:
            return False
        if known.effect is None or known.costs is None:
            return True
        if known.effect.width > _WIDTH or known.effect.log < 0 or since > _LOOK_SECONDS:
            return True
        return known.effect.log - known.costs.unpaired_log(self._trial.since) > _FALL

    @property
    def _loss(self) -> float:
        """Cost of a plain block as a share of its seconds."""
        known = self._trials[True].effect
        return _GUESS if known is None else max(1 - math.exp(-known.log), 0.0)

    def _end(self) -> None:
        trials, trial = self._trials[self._plain_inside], self._trial
        trials.add(trial, self.busy)
        if trials.costs is not None:
            drafted = trial.since if self._plain_inside else trial.inside
            self.budget.measured(trials.costs.trial_log(trial, self._plain_inside), drafted.seconds)
        self._begin()
