"""From a trained drafter to a version in service: the gate, the registry, the pointer, and what is told about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from osd.drafters.base import Drafter
from osd.learning.batch import DistillBatch
from osd.learning.gate import Gate, Verdict
from osd.registry.events import Events, Kind
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, Version, VersionError

logger = logging.getLogger(__name__)

Build = Callable[[dict[str, Any]], Drafter]
"""Makes a drafter from a version's config."""


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate; ``version`` is its number when it was published."""

    verdict: Verdict
    version: int | None


class Publisher:
    """Takes candidates of one domain through the gate, against the version that the rollout pointer names."""

    def __init__(
        self, domain: str, registry: Registry, pointer: Pointer, events: Events, gate: Gate, build: Build
    ) -> None:
        self._domain = domain
        self._registry = registry
        self._pointer = pointer
        self._events = events
        self._gate = gate
        self._build = build
        self._baseline: Drafter | None = None
        self.stable = 0

    def in_service(self) -> Version | None:
        """The stable version, or the newest older one that can be read; None while there is none.

        Raises:
            redis.exceptions.RedisError: the pointer cannot be read.
        """
        rollout = self._pointer.get(self._domain)
        if rollout is None:
            return None
        for number in range(rollout.stable, 0, -1):
            try:
                version = self._registry.load(self._domain, number)
            except VersionError as error:
                logger.warning("%s", error)
                continue
            self._take(version)
            return version
        return None

    def propose(
        self, candidate: Drafter, batches: Callable[[], Iterable[DistillBatch]], trained_on: dict[str, int]
    ) -> Outcome:
        """Judge a candidate and put it in service if it passes.

        Args:
            candidate: the drafter in training.
            batches: gives the held-out positions, anew at each call.
            trained_on: records, tokens and steps, for the manifest.

        Raises:
            redis.exceptions.RedisError: Redis is gone; nothing was put in service.
            osd.registry.versions.VersionError: the registry does not take it.
            OSError: the disk does not take it.
        """
        before = self._pointer.get(self._domain)
        if self._baseline is None or (before is not None and before.stable != self.stable):
            self.in_service()
        if self._baseline is None:
            return Outcome(Verdict(False, True, f"no drafter version of {self._domain} to compare with"), None)
        verdict = self._gate.judge(candidate, self._baseline, batches)
        if not verdict.passed:
            if not verdict.waits:
                self.tell("rejected", self.stable, reason=verdict.reason, **verdict.figures())
            return Outcome(verdict, None)
        if self._pointer.get(self._domain) != before:
            # Somebody moved the pointer, perhaps back: theirs counts, and the next candidate is compared with it.
            return Outcome(Verdict(False, True, "the rollout pointer moved during the evaluation"), None)
        manifest = {"parent": self.stable, "trained_on": trained_on, "gate": verdict.figures()}
        number = self._registry.publish(self._domain, candidate.weights(), candidate.config(), manifest)
        self._pointer.set(self._domain, Rollout(stable=number, canary=None, share=0.0, changed=time.time()))
        self._baseline.load_weights(candidate.weights())
        self.tell("published", number, parent=self.stable, trained_on=trained_on, **verdict.figures())
        self.stable = number
        return Outcome(verdict, number)

    def tell(self, kind: Kind, version: int | None, **figures: Any) -> None:
        """Put an event on the list; without Redis it is only logged."""
        try:
            self._events.add(kind, self._domain, version, **figures)
        except RedisError as error:
            logger.warning("the event %s could not be told: %s", kind, error)

    def _take(self, version: Version) -> None:
        baseline = self._build(version.config)
        baseline.load_weights(version.weights)
        self._baseline, self.stable = baseline, version.number
