"""Simulated training of a domain's drafter: arrival of records, candidates, gates and trials."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from osd.config import DomainAssumptions, TrainerSettings
from osd.economy.effect import Effect
from osd.economy.report import Measured
from osd.economy.training import Fund
from osd.learning.drift import Cusum
from osd.learning.gate import MIN_POSITIONS, TOLERANCE
from osd.learning.online import FIRST_SECONDS, MIN_HELD_OUT_TOKENS, PASSES, WORTHWHILE
from osd.learning.replay import states_probability, states_share
from osd.simulation.knowledge import DomainKnowledge, SimulatedVersion

_FIRST_HELD_OUT = 1 / 3  # share of the records until the gate has enough
_FRESH_SHARE = 0.5  # share of a micro-batch for new records
_TRIAL_SECONDS = 5.0  # busy seconds of a trial against the previous version
_TRIAL_ERROR = 0.07  # standard deviation of the logarithm of a trial's speed-up: 0.02 in a busy minute


class Trainee:
    """Learner with the fund, drift test and rules of the product, but without text.

    ``DomainKnowledge`` determines the gain of candidates and versions; gates and trials measure it with an error.

    Attributes:
        knowledge: of the domain.
        published: the newest version.
        fund: account of the domain's training.
        promised: logarithm of the speed-up at the last gate; None before the first.
        is_funded: whether the fund covered the next slice at the last decision.
        records: number of records.
        gates: number of gate evaluations.
        candidate_due: value of ``trained`` at which the next candidate is due.
        trained: tokens trained on, repeats included.
        seconds: CPU seconds of micro-steps since the last fall of acceptance.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        assumed: DomainAssumptions,
        knowledge: DomainKnowledge,
        chance: np.random.Generator,
    ) -> None:
        self._settings, self._assumed, self._chance = settings, assumed, chance
        self.knowledge = knowledge
        self.fund = Fund()
        self.fund.follow(1)
        self.promised: float | None = None
        self.published: SimulatedVersion = knowledge.version(1)
        self.records = self.gates = 0
        self.is_funded = True
        self.candidate_due = float(settings.steps_per_candidate * settings.micro_batch_tokens)
        self.trained = self.seconds = 0.0
        self._before = self.published
        self._measured = self._noise = 0.0
        self._held_out = self._budget = self._parts = 0.0
        self._fresh = self._answers = self._arrived = 0.0
        self._improving, self._best = True, 0.0
        self._watch = Cusum(settings.drift_fall, settings.drift_records)

    def arrive(self, answer: int, copies: float, weight: float, acceptance: float, wanted_share: float = 1.0) -> None:
        """Add copies of a record; parts of records add up to whole records.

        Args:
            answer: tokens of the answer.
            copies: number of records.
            weight: number of requests that a record represents.
            acceptance: probability that a draft token was accepted.
            wanted_share: share of training records whose states the trainer wants, as the replica knows it.
        """
        share = self._held_out_share
        self._held_out += share * states_probability(wanted_share, held_out=True) * answer * copies
        kept = (1 - share) * states_probability(wanted_share, held_out=False) * copies
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
        fall = self._watch.add(int(self._chance.binomial(tested, acceptance)), tested, weight)
        if fall is not None:
            self.fund.drift()
            self.promised, self.seconds = None, 0.0
            self._new_watch()
            self._improving, self._held_out = True, 0.0  # the gate uses no records from before a fall

    @property
    def wanted_share(self) -> float:
        """Share of the training records whose hidden states the trainer wants."""
        return states_share(self._fresh, self.is_funded)

    def states_share(self, wanted_share: float) -> float:
        """Return the share of all records with hidden states, given the wanted share of training records."""
        share = self._held_out_share
        held_out, training = (states_probability(wanted_share, held_out=held_out) for held_out in (True, False))
        return share * held_out + (1 - share) * training

    @property
    def ready(self) -> bool:
        """Whether there are enough records, and passes over them are left or the last candidate gained."""
        return self.records >= self._settings.min_records and (self._budget > 0 or self._improving)

    def serve(self, busy: float, gain: Callable[[SimulatedVersion, SimulatedVersion], float]) -> None:
        """Account for computation of replicas, with trials of the newest version against the previous one.

        Args:
            busy: core seconds of the domain's requests.
            gain: returns the logarithm of the true speed-up from a version to another.
        """
        self.fund.serve(busy)
        if self._before is self.published or not busy:
            return
        trials = busy / _TRIAL_SECONDS
        self._measured += trials
        self._noise += _TRIAL_ERROR * math.sqrt(trials) * float(self._chance.standard_normal())
        log = gain(self._before, self.published) + self._noise / self._measured
        effect = Effect(log, _TRIAL_ERROR / math.sqrt(self._measured), int(self._measured))
        self.fund.measure({self.published.number: Measured.of(effect, drafted=1.0)})

    def learn(self, tokens: float, seconds: float, price: float = 0.0, lost: float = 0.0) -> None:
        """Train on tokens.

        Args:
            tokens: number of tokens.
            seconds: CPU seconds of the training.
            price: of a CPU second.
            lost: core seconds that requests lost.
        """
        before = self.seconds
        self.knowledge.trained += tokens
        self.trained += tokens
        self._budget = max(self._budget - tokens, 0.0)
        if self._arrived:
            fresh = _FRESH_SHARE * tokens / (self._answers / self._arrived)
            self._fresh = max(self._fresh - fresh, 0.0)
        self.seconds += seconds
        self.fund.learn(seconds, price, lost)
        if before < FIRST_SECONDS <= self.seconds:
            self.candidate_due = min(self.candidate_due, self.trained)

    @property
    def due(self) -> bool:
        """Whether a candidate is due."""
        return self.trained >= self.candidate_due

    def judge(self, seconds: float, price: float = 0.0) -> SimulatedVersion | None:
        """Evaluate the candidate at the gate, which takes CPU ``seconds`` at a ``price``.

        Returns:
            The new version; None if the candidate failed or there are too few held-out positions.
        """
        every = self._settings.steps_per_candidate
        steps = every if self._held_out >= MIN_POSITIONS else max(every // 5, 1)
        self.candidate_due = self.trained + steps * self._settings.micro_batch_tokens
        if self._held_out < MIN_POSITIONS:
            return None
        self.gates += 1
        self.fund.learn(seconds, price)
        self.fund.end_slice()
        # The model has lengths; an error of acceptance changes a length by this error at each of ``depth`` places.
        depth, knowledge, error = self._assumed.depth, self.knowledge, self._assumed.gate_error
        before = self._assumed.length + knowledge.version_gain(self.published)
        after = self._assumed.length + knowledge.training_gain
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
        """Forget the best candidate after a change of the traffic."""
        self._best = 0.0

    @property
    def _held_out_share(self) -> float:
        return self._settings.held_out if self._held_out >= MIN_HELD_OUT_TOKENS else _FIRST_HELD_OUT

    def _new_watch(self) -> None:
        self._watch = Cusum(self._settings.drift_fall, self._settings.drift_records)
