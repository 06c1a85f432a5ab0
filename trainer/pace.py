"""When to train: what starts an update, and how long the same records are worth further passes."""

from __future__ import annotations

import math

from osd.config import TrainerSettings
from osd.learning.gate import GateDecision

PASSES = 8
"""How often the completion of a new record is trained on whatever the held-out figures say."""

WORTHWHILE = 0.99
"""A candidate improved when its held-out divergence is below so much of the one before: less does not pay."""


class Pace:
    """Decides, from numbers alone, whether the records at hand are worth a micro-step.

    An update starts when ``trainer.trigger_records`` new records have come, when one of them has waited for
    ``trainer.trigger_seconds``, or when drift was found. It goes on until every record was trained on at least once
    and for its eight passes, and then for as long as each candidate improves the held-out divergence. The first
    candidate of a drafter is waited for in any case: nothing else can tell what further passes are worth.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._improving = True
        self._budget = 0
        self._running = True
        self._waiting_since: float | None = None
        self._drifted = False
        self._best, self._held_out = math.inf, 0

    def resumed(self) -> None:
        """The drafter comes from a checkpoint: whether it still improves is not known, and new records decide."""
        self._improving = self._running = False

    def arrived(self, tokens: int) -> None:
        """``tokens`` completion tokens came that were never trained on."""
        self._budget += PASSES * tokens

    def drifted(self) -> None:
        """Acceptance fell: what is new is to be learned at once."""
        self._drifted = True

    def worked(self, positions: int) -> None:
        """A micro-step trained on so many completion tokens."""
        self._budget = max(self._budget - positions, 0)

    def judged(self, verdict: GateDecision, held_out: int) -> None:
        """The gate looked at a candidate.

        Args:
            verdict: what it said.
            held_out: records that were ever held out; figures compare only while it stays the same.
        """
        if verdict.candidate is None or verdict.baseline is None:
            self._improving = False
            return
        if held_out != self._held_out:
            self._best, self._held_out = math.inf, held_out
        divergence = verdict.candidate.divergence
        # Written so that a comparison with NaN ends the update.
        self._improving = divergence < WORTHWHILE * min(verdict.baseline.divergence, self._best)
        self._best = min(self._best, divergence)

    def figures(self) -> dict[str, float]:
        """How far along the update is: completion tokens still to be trained on, and the best divergence so far."""
        return {"budget": self._budget} | ({} if math.isinf(self._best) else {"best_divergence": self._best})

    def due(self, fresh: int, now: float) -> bool:
        """Whether a micro-step is worth it.

        Args:
            fresh: records that were never trained on.
            now: a monotonic clock, in seconds.
        """
        if not fresh:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self._running:
            self._running = bool(fresh or self._budget or self._improving)
        elif self._waiting_since is not None:
            waited = now - self._waiting_since
            settings = self._settings
            self._running = self._drifted or fresh >= settings.trigger_records or waited >= settings.trigger_seconds
        if self._running and fresh:
            self._drifted = False
        return self._running
