"""Figures of the measured speed-up that add up over replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from osd.economy.effect import Effect


@dataclass(frozen=True)
class Measured:
    """Measurement of one replica, or of several together: of drafting against plain decoding, or of two versions.

    Of two versions, ``drafted`` are seconds with the candidate, and ``plain`` the seconds of the stable version for the
    same work.

    Attributes:
        trials: number of trials in the last busy hour.
        drafted: seconds of the measured steps with drafting.
        plain: seconds that plain decoding would have taken for the same tokens and prompts, at the same load.
        variance: of ``plain``, in square seconds.
        spent: seconds that measuring is estimated to have cost since the replica started.
        guarded: number of replicas in which the measured drafting is off, because it lost time or gains too little.
        replicas: number of replicas that measured.
    """

    trials: int = 0
    drafted: float = 0.0
    plain: float = 0.0
    variance: float = 0.0
    spent: float = 0.0
    guarded: int = 0
    replicas: int = 1

    @classmethod
    def of(cls, effect: Effect, drafted: float) -> Measured:
        """Return the measurement with this effect over the ``drafted`` seconds."""
        plain = drafted * math.exp(effect.log)
        return cls(effect.trials, drafted, plain, (plain * effect.error) ** 2)

    @property
    def effect(self) -> Effect | None:
        """Measured speed-up; None without measurements."""
        if not self.drafted or self.plain <= 0:
            return None
        return Effect(math.log(self.plain / self.drafted), math.sqrt(self.variance) / self.plain, self.trials)

    def __add__(self, other: Measured) -> Measured:
        """Return the measurement of both together."""
        return Measured(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


RECALL_ALONE = 0
"""Version that stands for recall without the trained drafter, in comparisons of a mixed drafter."""


@dataclass(frozen=True)
class Comparison:
    """Measurement of the version ``candidate`` of a domain's drafter against the version ``stable``."""

    candidate: int
    stable: int
    measured: Measured
