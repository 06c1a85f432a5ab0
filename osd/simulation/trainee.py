"""A domain's drafter in training: what arrives for it, when a candidate is due, and what the gate says of it."""

from __future__ import annotations

import numpy as np

from osd.config import DomainsAssumed, TrainerSettings
from osd.learning.drift import Cusum
from osd.learning.gate import MIN_POSITIONS, TOLERANCE
from osd.learning.online import ENOUGH_TOKENS, PASSES, WORTHWHILE
from osd.learning.replay import states_chance, states_wanted
from osd.learning.value import SLICE, Value
from osd.simulation.knowledge import Knowledge, SimulatedVersion

_FIRST_HELD_OUT = 1 / 3  # of the records, until there are enough to judge by
_FRESH_SHARE = 0.5  # of a micro-batch, for records that were never trained on


class Trainee:
    """What the learner is in the product, with the product's own value, drift test and rules.

    Only the text is missing: what a candidate and the version in service give is known from ``Knowledge``, and a gate
    sees it with an error.

    Attributes:
        published: the newest version, the first one to begin with.
        value: what the trainer reckons with.
        pays: whether the next slice is expected to, as it was decided last.
    """

    def __init__(
        self, settings: TrainerSettings, assumed: DomainsAssumed, knowledge: Knowledge, chance: np.random.Generator
    ) -> None:
        self._settings, self._assumed, self._chance = settings, assumed, chance
        self.knowledge = knowledge
        self.value = Value(assumed.depth, settings.drift_records, assumed.second)
        self.value.length = assumed.length
        self.published: SimulatedVersion = knowledge.version(1)
        self.records = self.gates = 0
        self.pays = True
        self.candidate_due = float(settings.steps_per_candidate * settings.micro_batch_tokens)
        self.trained = 0.0
        """Tokens trained on since the beginning, repeats included."""
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
        self.value.arrived(whole * weight)
        if not whole:
            return
        tested = answer * whole
        now = self._watch.add(int(self._chance.binomial(tested, acceptance)), tested, weight)
        if now is not None:
            self.value.drifted(self._watch.level, now)
            self._new_watch()
            self._improving, self._held_out = True, 0.0  # what came before a fall judges no more

    @property
    def wanted(self) -> float:
        """The share of the records to train on whose hidden states it wants."""
        return states_wanted(self._fresh, self.pays)

    def states(self, wanted: float) -> float:
        """The share of all records whose hidden states are written where so much is ``wanted``."""
        share = self._held_out_share
        return share * states_chance(wanted, held_out=True) + (1 - share) * states_chance(wanted, held_out=False)

    @property
    def ready(self) -> bool:
        """Whether there is something to train on."""
        return self.records >= self._settings.min_records and (self._budget > 0 or self._improving)

    def learn(self, tokens: float, seconds: float) -> None:
        """Train on so many tokens, which took CPU ``seconds``."""
        begun = self.value.seconds
        self.knowledge.trained += tokens
        self.trained += tokens
        self._budget = max(self._budget - tokens, 0.0)
        if self._arrived:
            fresh = _FRESH_SHARE * tokens / (self._answers / self._arrived)
            self._fresh = max(self._fresh - fresh, 0.0)
        self.value.learned(seconds)
        if begun < SLICE <= self.value.seconds:
            self.candidate_due = min(self.candidate_due, self.trained)

    @property
    def due(self) -> bool:
        """Whether it is time for a candidate."""
        return self.trained >= self.candidate_due

    def judge(self, seconds: float) -> SimulatedVersion | None:
        """Let the gate look, which takes CPU ``seconds``; the version that is published if it passed."""
        every = self._settings.steps_per_candidate
        steps = every if self._held_out >= MIN_POSITIONS else max(every // 5, 1)
        self.candidate_due = self.trained + steps * self._settings.micro_batch_tokens
        if self._held_out < MIN_POSITIONS:
            return None
        self.gates += 1
        self.value.charged(seconds)
        # Length, not acceptance, is what is known here: at each of ``depth`` places both differ alike.
        depth, knowledge, error = self._assumed.depth, self.knowledge, self._assumed.gate_error
        before = self._assumed.length + knowledge.adds(self.published)
        after = self._assumed.length + knowledge.gained
        seen = before + max(after - before + depth * error * float(self._chance.standard_normal()), 1 - before)
        passed = seen - before >= -depth * min(error, TOLERANCE)
        self.value.compared(seen, before, depth * error, passed)
        self._improving = after - self._best > (1 - WORTHWHILE) * self._assumed.gain
        self._best = max(self._best, after)
        if not passed:
            return None
        self.published = knowledge.version(self.published.number + 1)
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
