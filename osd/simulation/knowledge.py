"""Model of learning: the tokens per step that recall, the drafter in training and its versions add in a domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from osd.config import DomainAssumptions
from osd.simulation.draft_curve import DraftCurve, draft_curve, uniform_acceptance

PLAIN, UNTRAINED, TRAINED = "plain", "untrained", "trained"
WAYS = (PLAIN, UNTRAINED, TRAINED)
"""Simulated deployments: without drafts; with recall and the first version; with recall and training."""


@dataclass(frozen=True)
class SimulatedVersion:
    """Drafter version.

    Attributes:
        domain: number of the domain.
        number: of the version.
        level: tokens per step that it added when it was made.
        changes: number of traffic changes before it was made.
    """

    domain: int
    number: int
    level: float
    changes: int


class DomainKnowledge:
    """Learning in a domain: after x tokens recall and the drafter add ``b (1 - exp(-x / t))`` tokens per step.

    Attributes:
        remembered: tokens that recall has learnt; a change of the traffic reduces them.
        trained: tokens that the drafter was trained on; a change of the traffic reduces them.
        changes: number of traffic changes.
    """

    def __init__(self, assumed: DomainAssumptions, domain: int) -> None:
        self._assumed, self._domain = assumed, domain
        self.remembered = self.trained = 0.0
        self.changes = 0

    @property
    def training_gain(self) -> float:
        """Tokens per step that the drafter in training adds."""
        return self._assumed.gain * -math.expm1(-self.trained / self._assumed.tokens)

    @property
    def recall_gain(self) -> float:
        """Tokens per step that recall adds."""
        return self._assumed.recall_gain * -math.expm1(-self.remembered / self._assumed.recall_tokens)

    def change(self) -> None:
        """Change the traffic, which makes a part of the learning worthless."""
        self.changes += 1
        kept = 1 - self._assumed.drift_loss
        self.trained = _after(self.trained, self._assumed.tokens, kept)
        self.remembered = _after(self.remembered, self._assumed.recall_tokens, kept)

    def version(self, number: int) -> SimulatedVersion:
        """Return a version of the current drafter in training."""
        return SimulatedVersion(self._domain, number, self.training_gain, self.changes)

    def version_gain(self, version: SimulatedVersion) -> float:
        """Return the tokens per step that a version adds to the current traffic."""
        return version.level * (1 - self._assumed.drift_loss) ** (self.changes - version.changes)

    def length(self, version: SimulatedVersion) -> float:
        """Return the tokens per step of the longest drafts with a version."""
        return self._assumed.length + self.recall_gain + self.version_gain(version)

    def acceptance(self, version: SimulatedVersion) -> float:
        """Return the mean acceptance probability of a draft token with a version."""
        return _acceptance(round(self.length(version), 3), self._assumed.depth)


_acceptance = lru_cache(maxsize=4096)(uniform_acceptance)


def _after(seen: float, most: float, kept: float) -> float:
    """Return the number of tokens whose gain is ``kept`` times the gain of ``seen`` tokens."""
    return -most * math.log1p(kept * math.expm1(-seen / most))


def curve_of(way: str, assumed: DomainAssumptions, acceptance: float) -> DraftCurve:
    """Return the draft curve of a deployment; plain decoding has no drafts."""
    hundredths = 0 if way == PLAIN else round(100 * acceptance)
    return draft_curve(hundredths, assumed.depth, assumed.certainty, assumed.second)
