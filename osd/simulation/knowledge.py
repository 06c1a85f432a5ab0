"""What is known of a domain's traffic: by recall, by the drafter in training, and by each version of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from osd.config import DomainsAssumed
from osd.simulation.draft_curve import DraftCurve, alike, draft_curve

PLAIN, UNTRAINED, TRAINED = "plain", "untrained", "trained"
WAYS = (PLAIN, UNTRAINED, TRAINED)
"""What a deployment does: no drafts, recall and the first version, and with training."""


@dataclass(frozen=True)
class SimulatedVersion:
    """A drafter version: ``level`` tokens per round were gained when it was made, after so many ``changes``."""

    domain: int
    number: int
    level: float
    changes: int


class Knowledge:
    """Of one domain. Recall and the drafter learn ``b (1 - exp(-x / t))`` tokens per round of x tokens."""

    def __init__(self, assumed: DomainsAssumed, domain: int) -> None:
        self._assumed, self._domain = assumed, domain
        self.remembered = self.trained = 0.0
        """Tokens that recall has seen, and that the drafter in training was trained on; a change takes some away."""
        self.changes = 0

    @property
    def gained(self) -> float:
        """Tokens per round that the drafter in training adds."""
        return self._assumed.gain * -math.expm1(-self.trained / self._assumed.tokens)

    @property
    def recalled(self) -> float:
        """Tokens per round that recall adds."""
        return self._assumed.recall_gain * -math.expm1(-self.remembered / self._assumed.recall_tokens)

    def change(self) -> None:
        """The traffic changes: some of what was learnt is worth nothing any more."""
        self.changes += 1
        kept = 1 - self._assumed.drift_loss
        self.trained = _after(self.trained, self._assumed.tokens, kept)
        self.remembered = _after(self.remembered, self._assumed.recall_tokens, kept)

    def version(self, number: int) -> SimulatedVersion:
        """The drafter in training, as it is now."""
        return SimulatedVersion(self._domain, number, self.gained, self.changes)

    def adds(self, version: SimulatedVersion) -> float:
        """Tokens per round that a version adds today."""
        return version.level * (1 - self._assumed.drift_loss) ** (self.changes - version.changes)

    def length(self, version: SimulatedVersion) -> float:
        """Tokens per round of the longest drafts with a version."""
        return self._assumed.length + self.recalled + self.adds(version)

    def acceptance(self, version: SimulatedVersion) -> float:
        """Chance that a drafted token is accepted, on average."""
        return _acceptance(round(self.length(version), 3), self._assumed.depth)


_acceptance = lru_cache(maxsize=4096)(alike)


def _after(seen: float, most: float, kept: float) -> float:
    """Tokens after which what is known is ``kept`` of what it is after ``seen``."""
    return -most * math.log1p(kept * math.expm1(-seen / most))


def curve_of(way: str, assumed: DomainsAssumed, acceptance: float) -> DraftCurve:
    """How drafts do; plain decoding has none."""
    hundredths = 0 if way == PLAIN else round(100 * acceptance)
    return draft_curve(hundredths, assumed.depth, assumed.certainty, assumed.second)
