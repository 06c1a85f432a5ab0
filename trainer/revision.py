"""A new revision of the target: whether the drafter in service, which learnt from the one before, still helps."""

from __future__ import annotations

from dataclasses import dataclass

from osd.learning.drift import Drift
from osd.learning.evaluation import GateFigures
from osd.registry.versions import Version

TARGET = "target"
"""The manifest's label of the target that a version learnt from."""


@dataclass(frozen=True)
class Revision:
    """Version ``number`` learnt from another target, on which its acceptance rate was ``before`` by the gate."""

    number: int
    before: float

    @classmethod
    def of(cls, version: Version, target: str) -> Revision | None:
        """What ``version`` has to be judged for on a ``target``; None where it learnt from that, or from nothing."""
        gate = version.manifest.get("gate") or {}
        if version.manifest.get(TARGET, target) == target or "acceptance" not in gate:
            return None
        return cls(version.number, float(gate["acceptance"]))

    def fallen(self, now: GateFigures, fall: float, domain: str) -> Drift | None:
        """How far it fell on the new target, None where that is less than ``fall``: it helps as it did."""
        # Written so that a comparison with NaN is a fall.
        helps = now.acceptance >= self.before - fall
        return None if helps else Drift(domain, self.number, self.before, now.acceptance)
