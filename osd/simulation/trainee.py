"""A domain's drafter in training: what arrives for it, when a candidate is due, and what the gate says of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from osd.config import DomainsAssumed, TrainerSettings
from osd.economy.report import Measured
from osd.economy.training import Fund
from osd.learning.drift import Cusum
from osd.learning.gate import MIN_POSITIONS, TOLERANCE
from osd.learning.online import ENOUGH_TOKENS, FIRST_SECONDS, PASSES, WORTHWHILE
from osd.learning.replay import states_chance, states_wanted
from osd.simulation.knowledge import Knowledge, SimulatedVersion

_FIRST_HELD_OUT = 1 / 3  # of the records, until there are enough to judge by
_FRESH_SHARE = 0.5  # of a micro-batch, for records that were never trained on
_TRIAL_SECONDS = 5.0  # busy seconds of a trial of a version against the one before
_TRIAL_ERROR = 0.07  # standard deviation of the logarithm that it measures: 0.02 in a busy minute


class Trainee:
    """The learner of the product, with the product's own fund, drift test and rules.

    Only the text is missing: what a candidate and the version in service give is known from ``Knowledge``, and a gate
    and trials see it with an error.

    Attributes:
        published: the newest version, the first one to begin with.
        fund: account of the domain's training.
        promised: logarithm of the gain that the last gate saw; None before one.
        begins: whether the fund covered the next slice at the last decision.
    """

    def __init__(
        self, settings: TrainerSettings, assumed: DomainsAssumed, knowledge: Knowledge, chance: np.random.Generator
    ) -> None:
        self._settings, self._assumed, self._chance = settings, assumed, chance
        self.knowledge = knowledge
        self.fund = Fund()
        self.fund.follow(1)
        self.promised: float | None = None
        self.published: SimulatedVersion = knowledge.version(1)
        self.records = self.gates = 0
        self.begins = True
        self.candidate_due = float(settings.steps_per_candidate * settings.micro_batch_tokens)
        self.trained = 0.0
        """Tokens trained on since the beginning, repeats included."""
        self.seconds = 0.0
        """CPU seconds of micro-steps since the last fall of acceptance."""
        self._before = self.published
        self._measured = self._noise = 0.0
        self._held_out = self._budget = self._parts = 0.0
        self._fresh = self._answers = self._arrived = 0.0
        self._improving, self._best = True, 0.0
        self._watch = Cusum(settings.drift_fall, settings.drift_records)

    def arrive(self, answer: int, copies: float, weight: float, acceptance: float, wanted: float = 1.0) -> None:
        """Take in so many records of an answer, drafted for with this chance that a token is accepted.

        Each stands for ``weight`` requests. Of parts of a record the next whole one is counted. States are written as
        if this share of them was ``wanted``.
        """
        share = self._held_out_share
        self._held_out += share * states_chance(wanted, held_out=True) * answer * copies
        kept = (1 - share) * states_chance(wanted, held_out=False) * copies
        self._fresh += kept
        self._answers, self._arrived = self._answers + answer * copies, self._arrived + copies
        self._budget += kept * answer * PASSES
        self._parts += copies
        whole = int(self._parts)
        self._parts -= whole
        self.records += whole
        if not whole:
            return
        tested = answer * whole
        now = self._watch.add(int(self._chance.binomial(tested, acceptance)), tested, weight)
        if now is not None:
            self.fund.drift()
            self.promised, self.seconds = None, 0.0
            self._new_watch()
            self._improving, self._held_out = True, 0.0  # what came before a fall judges no more

    @property
    def wanted(self) -> float:
        """The share of the records to train on whose hidden states it wants."""
        return states_wanted(self._fresh, self.begins)

    def states(self, wanted: float) -> float:
        """The share of all records whose hidden states are written where so much is ``wanted``."""
        share = self._held_out_share
        return share * states_chance(wanted, held_out=True) + (1 - share) * states_chance(wanted, held_out=False)

    @property
    def ready(self) -> bool:
        """Whether there is something to train on."""
        return self.records >= self._settings.min_records and (self._budget > 0 or self._improving)

    def serve(self, busy: float, gain: Callable[[SimulatedVersion, SimulatedVersion], float]) -> None:
        """Replicas computed for the domain for so many ``busy`` core seconds.

        Trials compare the newest version with the one before; ``gain`` is the logarithm of the true speed-up.
        """
        self.fund.serve(busy)
        if self._before is self.published or not busy:
            return
        trials = busy / _TRIAL_SECONDS
        self._measured += trials
        self._noise += _TRIAL_ERROR * math.sqrt(trials) * float(self._chance.standard_normal())
        log, error = gain(self._before, self.published) + self._noise / self._measured, _TRIAL_ERROR
        variance = (math.exp(log) * error) ** 2 / self._measured
        measured = Measured(int(self._measured), drafted=1.0, plain=math.exp(log), variance=variance)
        self.fund.measure({self.published.number: measured})

    def learn(self, tokens: float, seconds: float, price: float = 0.0, lost: float = 0.0) -> None:
        """Train on so many tokens, which took CPU ``seconds`` at a ``price``, and requests ``lost`` core seconds."""
        begun = self.seconds
        self.knowledge.trained += tokens
        self.trained += tokens
        self._budget = max(self._budget - tokens, 0.0)
        if self._arrived:
            fresh = _FRESH_SHARE * tokens / (self._answers / self._arrived)
            self._fresh = max(self._fresh - fresh, 0.0)
        self.seconds += seconds
        self.fund.learn(seconds, price, lost)
        if begun < FIRST_SECONDS <= self.seconds:
            self.candidate_due = min(self.candidate_due, self.trained)

    @property
    def due(self) -> bool:
        """Whether it is time for a candidate."""
        return self.trained >= self.candidate_due

    def judge(self, seconds: float, price: float = 0.0) -> SimulatedVersion | None:
        """Let the gate look, which takes CPU ``seconds``; the version that is published if it passed."""
        every = self._settings.steps_per_candidate
        steps = every if self._held_out >= MIN_POSITIONS else max(every // 5, 1)
        self.candidate_due = self.trained + steps * self._settings.micro_batch_tokens
        if self._held_out < MIN_POSITIONS:
            return None
        self.gates += 1
        self.fund.learn(seconds, price)
        self.fund.end_slice()
        # Length, not acceptance, is what is known here: at each of ``depth`` places both differ alike.
        depth, knowledge, error = self._assumed.depth, self.knowledge, self._assumed.gate_error
        before = self._assumed.length + knowledge.adds(self.published)
        after = self._assumed.length + knowledge.gained
        seen = before + max(after - before + depth * error * float(self._chance.standard_normal()), 1 - before)
        passed = seen - before >= -depth * min(error, TOLERANCE)
        self.promised = math.log(seen / before)
        self._improving = after - self._best > (1 - WORTHWHILE) * self._assumed.gain
        self._best = max(self._best, after)
        if not passed:
            return None
        self._before, self.published = self.published, knowledge.version(self.published.number + 1)
        self._measured = self._noise = 0.0
        self.fund.follow(self.published.number, self.promised)
        self._new_watch()
        return self.published

    def changed(self) -> None:
        """The traffic is another one: what the best candidate was is forgotten."""
        self._best = 0.0

    @property
    def _held_out_share(self) -> float:
        return self._settings.held_out if self._held_out >= ENOUGH_TOKENS else _FIRST_HELD_OUT

    def _new_watch(self) -> None:
        self._watch = Cusum(self._settings.drift_fall, self._settings.drift_records)
