"""Schedule of trials: random short blocks of decoding steps without drafting, or with drafting while it is off.

A plain block costs time when drafting is faster. A share of the busy seconds pays for it and is saved while no trial
runs. Trials follow each other while the interval of the speed-up is wide or the speed-up seems to have fallen, and are
rare otherwise. While drafting is off, the loss budget pays for the blocks with drafting.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from osd.economy import effect
from osd.economy.effect import AROUND, BLOCK, CELL, DRAFTED_BLOCK, PLAIN_BLOCK, SECONDS, WHOLE_BLOCK, Effect, Step
from osd.economy.guard import LossBudget
from osd.economy.report import Measured

BANK_SECONDS = 10.0
"""Largest bank of seconds for measuring, as ``docs/economy.md`` promises."""

BEGIN_SECONDS = 2.0
"""First content of each bank, as ``docs/economy.md`` promises: a replica's speed-up is known within a busy minute."""

FIRST_LOSS = 0.5
"""Loss by a block, as a share of its seconds, before the first estimate: as if the other arm were twice as fast."""

MOST_TRIALS = 400
"""Trials, or pairs of sums, of an estimate, which then takes one or two milliseconds."""

KEPT_SECONDS = 3600.0
"""Busy seconds for which a trial counts: the last hour of ``docs/economy.md``."""

_LOOK_SECONDS = 120.0  # busy, after which a trial is due in any case, as docs/economy.md promises


class Bank:
    """Bank of seconds that measuring may cost.

    Attributes:
        seconds: content.
        spent: estimated seconds that measuring has cost.
    """

    def __init__(self) -> None:
        self.seconds, self.spent = BEGIN_SECONDS, 0.0

    def add(self, seconds: float) -> None:
        """Add seconds; the bank overflows at ``BANK_SECONDS``."""
        self.seconds = min(self.seconds + seconds, BANK_SECONDS)

    def spend(self, seconds: float) -> None:
        """Take out seconds that a measurement has cost; the content can become negative."""
        self.seconds -= seconds
        self.spent += seconds


class Switchback:
    """Schedule of random blocks of decoding steps without drafting, or with drafting while ``budget`` forbids it.

    Time is busy seconds of the engine, the sum of its steps: no clock is read.

    Attributes:
        busy: seconds so far.
        bank: pays for plain blocks.
        versions: bank that pays for comparisons of versions; it gets half of the share while there is one.
        compares: whether a comparison of versions needs ``versions``.
        budget: loss budget of drafting.
        costs: [3] of plain steps as of the last trial, see ``estimate``; None before the first estimate.
        measured: the speed-up as of the last trial while drafting was on; another thread may read it.
    """

    def __init__(self, measure: float, max_loss: float, seed: int) -> None:
        """Spend at most a share ``measure`` of busy seconds on measuring, and lose at most ``max_loss`` by drafting."""
        self._measure, self._max_loss, self._random = measure, max_loss, np.random.default_rng(seed)
        self.bank, self.versions, self.compares = Bank(), Bank(), False
        self.busy, self.measured = 0.0, Measured()
        self.costs: np.ndarray | None = None
        self._effect: Effect | None = None
        self._kept: deque[tuple[float, np.ndarray]] = deque(maxlen=MOST_TRIALS)  # of the last busy hour
        self.changed()

    def changed(self, renews_budget: bool = True) -> None:
        """Begin a trial of another drafter as soon as possible; ``renews_budget`` gives it a new loss budget.

        Trials of the last hour stay, because they measured the drafters of that hour.
        """
        if renews_budget:
            self.budget = LossBudget(self._max_loss)
        self._begin(self.measured)
        self._began = -math.inf

    @property
    def drafts(self) -> bool:
        """Whether drafters draft in the next step."""
        return self._plain_inside != self._is_inside

    @property
    def _is_inside(self) -> bool:
        return BLOCK <= self._place < 2 * BLOCK

    def observe(self, step: Step) -> None:
        """Add the decoding step that followed the last read of ``drafts``."""
        self.busy += step.seconds
        share = self._measure * step.seconds
        if self.compares:
            share /= 2
            self.versions.add(share)
        self.bank.add(share)
        self.budget.passed(step.seconds)
        if self._is_inside and self._plain_inside:
            self.bank.spend(step.seconds * self._loss)
        self._trial[1 + max(self._place // CELL, -1)] += step.sums()
        if self._place != -1 or self._is_due:
            self._place += 1
        if self._place == 3 * BLOCK:
            self._end()

    def _begin(self, measured: Measured) -> None:
        spent = self.bank.spent + self.versions.spent
        self.measured = replace(measured, spent=spent, guarded=int(not self.budget.allows))
        self._plain_inside, self._trial, self._began = self.budget.allows, np.zeros(effect.TRIAL), self.busy
        self._place = -1 - int(self._random.integers(BLOCK))

    @property
    def _is_due(self) -> bool:
        """Whether the next trial begins now."""
        before, since = self._trial[0], self.busy - self._began
        if not before[SECONDS]:  # the cost of a block is unknown
            return False
        block = BLOCK * float(before[SECONDS] / before[effect.STEPS])
        if not self._plain_inside:
            return self.budget.pays_for(block, since)
        if self.bank.seconds < block * self._loss:
            return False
        if self._effect is None or self.costs is None:
            return True
        if self._effect.width > effect.KNOWN_WIDTH or self._effect.log < 0 or since > _LOOK_SECONDS:
            return True
        fall = self._effect.log - effect.plain_log(self.costs, before)
        return fall > 2 * effect.LEAST_EFFECT

    @property
    def _loss(self) -> float:
        """Cost of a plain block as a share of its seconds."""
        return FIRST_LOSS if self._effect is None else max(1 - math.exp(-self._effect.log), 0.0)

    def _end(self) -> None:
        trial, measured = self._trial, self.measured
        around = trial[AROUND].sum(0)
        if self._plain_inside:
            plain, drafted = trial[PLAIN_BLOCK].sum(0), around + trial[0]
            lasted = drafted[SECONDS]
            self._kept.append((self.busy, trial))
            while self._kept[0][0] < self.busy - KEPT_SECONDS:
                self._kept.popleft()
            if (estimated := effect.estimate([trial for _, trial in self._kept])) is not None:
                self._effect, self.costs, all_seconds = estimated
                measured = Measured.of(self._effect, all_seconds)
        else:
            plain, drafted = around, trial[DRAFTED_BLOCK].sum(0)
            lasted = trial[WHOLE_BLOCK].sum(0)[SECONDS]
        if self.costs is not None:
            self.budget.measured(effect.trial_log(self.costs, plain, drafted), float(lasted))
        self._begin(measured)
