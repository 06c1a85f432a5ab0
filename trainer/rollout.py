"""From a trained drafter to a version in service: the gate, the registry, the canary, the pointer.

    candidate --gate--> version --canary--> stable       (with ``trainer.canary_share`` 0: version --> stable)
        |                  '--> rolled back: worse, silently corrupt, or nobody could tell in time
        '--> rejected: never leaves the trainer

The pointer is the state, and the evidence is all that a restart loses: whoever takes over watches the canary
that the pointer names until the same time limit. A pointer that somebody else moved is left as it is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.recall.snapshot import Snapshots
from osd.drafting.trainable import Trainable
from osd.learning.gate import GateDecision
from osd.registry.events import Events, Kind
from osd.registry.lease import Lease
from osd.registry.pointer import Pointer, Rollout
from osd.registry.retention import retire
from osd.registry.versions import Registry, Version, VersionError
from trainer.canary import Canary, Evidence, Judgement, expected_rate
from trainer.executor import Build

logger = logging.getLogger(__name__)

_RECALL = "recall"
_REMEMBERED = 600  # seconds in which an upstream drafted

Judge = Callable[[Trainable, Trainable], GateDecision]
"""Asks the gate about a candidate and the drafter in service."""

About = Callable[[GateDecision], dict[str, Any]]
"""What to write down about a candidate that passed: what it was trained on, and its cost."""

COST = "cost"
"""The manifest's core seconds of training: of the version, of the domain so far, and those of these beside requests."""


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate; ``version`` is its number when it was published."""

    decision: GateDecision
    version: int | None


@dataclass(frozen=True)
class Service:
    """One domain's registry, rollout pointer and events, and the right to change the first two.

    Whatever changes them raises ``osd.registry.pointer.FencedError`` when another trainer has taken over the domain.
    """

    domain: str
    registry: Registry
    pointer: Pointer
    events: Events
    lease: Lease

    def rollout(self) -> Rollout | None:
        """What the pointer says."""
        return self.pointer.get(self.domain)

    def move(self, before: Rollout | None, rollout: Rollout) -> bool:
        """Move the pointer if it still is ``before``; False when somebody else has."""
        return self.pointer.replace(self.domain, before, rollout, self.lease.fence)

    def finish(self) -> None:
        """What was begun in the registry is done, or given up."""
        with self.lease.held():
            self.registry.finish(self.domain)

    def recalled(self) -> dict[str, str]:
        """As ``recall`` the hash of the latest snapshot of what replicas recall beside the drafter, if there is one."""
        about = Snapshots(self.registry.root).about(self.domain)
        return {} if about is None else {_RECALL: about.sha256}

    def tell(self, kind: Kind, version: int | None, **figures: Any) -> None:
        """Put an event on the list; without Redis it is only logged."""
        self.events.tell(kind, self.domain, version, **figures)

    def close(self) -> None:
        """Close the connections."""
        self.pointer.close()
        self.events.close()


class CanaryWatch:
    """Gathers evidence on the ``canary`` that the pointer names, if any, and promotes it or rolls it back."""

    def __init__(self, service: Service, seconds: float) -> None:
        self._service, self._seconds = service, seconds
        self._counted: deque[Evidence] = deque(maxlen=_REMEMBERED)
        self.canary: Canary | None = None

    def follow(self, rollout: Rollout) -> None:
        """Watch the canary that the pointer names, if it is another one than before."""
        if rollout.canary is None:
            self.canary = None
            return
        if self.canary is not None and (self.canary.version, self.canary.stable) == (rollout.canary, rollout.stable):
            return
        try:
            gate = self._service.registry.load(self._service.domain, rollout.canary).manifest.get("gate", {})
        except VersionError as error:
            logger.warning("%s", error)
            gate = {}
        expected = expected_rate(gate.get("per_depth", []))
        # Only what passed before this trainer watched is told by clocks that may be set.
        passed = min(max(time.time() - rollout.changed, 0.0), self._seconds)
        ends = time.monotonic() + self._seconds - passed
        self.canary = Canary(rollout.canary, rollout.stable, expected, ends)
        for shown in self._counted:
            self.canary.count(shown)

    def observe(self, trace: Trace) -> None:
        """Take in a live request, as evidence for or against the canary."""
        if self.canary is not None:
            self.canary.add(trace)

    def count(self, shown: Evidence) -> None:
        """Take in what an upstream counted.

        It may have one drafter at a time: what was shown of the stable version before a canary stands beside that.
        """
        self._counted.append(shown)
        if self.canary is not None:
            self.canary.count(shown)

    def decide(self, now: float) -> Judgement | None:
        """Promote the canary or roll it back when it is time, in monotonic seconds; None without a canary.

        Raises:
            redis.exceptions.RedisError: Redis is gone; nothing was decided.
            OSError: the disk does not take it; nothing was decided.
        """
        canary, service = self.canary, self._service
        if canary is None:
            return None
        judgement = canary.judge(now)
        if judgement.action == "watch":
            return judgement
        promoted = judgement.action == "promote"
        number = canary.version if promoted else canary.stable
        rollout = service.rollout()
        decided = Rollout(stable=number, canary=None, share=0.0, changed=time.time())
        if (
            rollout is None
            or (rollout.stable, rollout.canary) != (canary.stable, canary.version)
            or not service.move(rollout, decided)
        ):
            logger.info("version %d is no canary any more: somebody moved the rollout pointer", canary.version)
            self.canary = None
            return Judgement("watch", "the rollout pointer was moved")
        self.canary = None
        figures = {"reason": judgement.reason, **canary.figures(), **service.recalled()}
        if promoted:
            service.tell("promoted", number, parent=canary.stable, **figures)
        else:
            service.tell("rolled_back", number, previous=canary.version, **figures)
        logger.info("version %d, %s: %s", canary.version, judgement.action, judgement.reason)
        return judgement


class Promotion:
    """Takes candidates of one domain through gate and canary, against the version that the rollout pointer names.

    ``stable`` is the version that candidates are compared with, 0 before the first look. ``watch`` judges the canary.
    """

    def __init__(self, service: Service, settings: TrainerSettings, build: Build, keep: int) -> None:
        """``keep`` is how many of the newest versions stay on disk."""
        self.service, self._settings, self._build, self._keep = service, settings, build, keep
        self.watch = CanaryWatch(service, settings.canary_seconds)
        self._baseline: Trainable | None = None
        self.stable = 0

    @property
    def baseline(self) -> Trainable | None:
        """The drafter of ``stable``, None before the first look."""
        return self._baseline

    def in_service(self) -> Version | None:
        """The stable version, or the newest older one that can be read; None while there is none.

        A canary that the pointer names is watched from now on.

        Raises:
            redis.exceptions.RedisError, OSError: the pointer cannot be read, or what was begun cannot be finished.
        """
        self._finish()
        rollout = self.service.rollout()
        if rollout is None:
            return None
        self.watch.follow(rollout)
        for number in reversed(self.service.registry.numbers(self.service.domain)):
            if number > rollout.stable:
                continue
            try:
                version = self.service.registry.load(self.service.domain, number)
            except VersionError as error:
                logger.warning("%s", error)
                continue
            self._take(version)
            return version
        return None

    def propose(self, candidate: Trainable, judge: Judge, about: About) -> Outcome:
        """Judge a candidate and put it in service, as a canary first where that is asked for, if it passes.

        What ``about`` says of one that passed is for the manifest.

        Raises:
            redis.exceptions.RedisError: Redis is gone; nothing was put in service.
            osd.registry.versions.VersionError: the registry does not take it.
            OSError: the disk does not take it.
        """
        service = self.service
        self._finish()
        before = self.service.rollout()
        if before is not None:
            self.watch.follow(before)
        if self._baseline is None or (before is not None and before.stable != self.stable):
            self.in_service()
        if before is not None and before.pinned:
            return _waits(f"version {before.stable} is pinned")
        if self._baseline is None:
            return _waits(f"no drafter version of {service.domain} to compare with")
        if self.watch.canary is not None:
            return _waits(f"version {self.watch.canary.version} is still a canary")
        recalled = service.recalled()
        decision = judge(candidate, self._baseline)
        if not decision.passed:
            if not decision.waits:
                # A candidate has no number before it is published.
                service.tell("rejected", None, parent=self.stable, reason=decision.reason, **decision.figures())
            return Outcome(decision, None)
        # Somebody may move the pointer, perhaps back: theirs counts, and the next candidate is compared with it.
        moved = _waits("the rollout pointer moved during the evaluation")
        if service.rollout() != before:
            return moved
        share = self._settings.canary_share
        intention = {"parent": self.stable, "share": share}
        attempt = service.registry.begin(service.domain, intention, service.lease.held())
        manifest = {
            **about(decision),
            "parent": self.stable,
            "gate": decision.figures(),
            "attempt": attempt,
            **recalled,
        }
        number = service.registry.publish(
            service.domain, candidate.weights(), candidate.config(), manifest, service.lease.held()
        )
        if not self._put(number, before, share, manifest):
            return moved
        if not share:
            self._baseline.load_weights(candidate.weights())
            self.stable = number
        return Outcome(decision, number)

    def _put(self, number: int, before: Rollout | None, share: float, manifest: dict[str, Any]) -> bool:
        """Put a published version in service, or on trial; False when somebody moved the pointer from ``before``."""
        stable = manifest["parent"] if share else number
        rollout = Rollout(stable=stable, canary=number if share else None, share=share, changed=time.time())
        put = self.service.move(before, rollout)
        if put:
            self.watch.follow(rollout)
            self._tell_put(number, share, manifest)
        self.service.finish()
        return put

    def retire(self) -> list[int]:
        """Remove the versions that need not stay; returns the numbers of those that do."""
        service = self.service
        try:
            return retire(service.registry, service.domain, self._keep, service.lease.held())
        except OSError as error:
            logger.warning("old versions of %s are not removed: %s", service.domain, error)
            return service.registry.numbers(service.domain)

    def _tell_put(self, number: int, share: float, manifest: dict[str, Any]) -> None:
        kind, more = ("canary", {"share": share}) if share else ("published", {"trained_on": manifest["trained_on"]})
        more = {**manifest.get(COST, {}), **more}
        recalled = {name: manifest[name] for name in (_RECALL,) if name in manifest}
        self.service.tell(kind, number, parent=manifest["parent"], **more, **manifest["gate"], **recalled)

    def _finish(self) -> None:
        """Finish what a trainer that was killed, or lost Redis, had published and not put in service yet.

        Raises:
            redis.exceptions.RedisError: Redis is gone; it is tried again.
            OSError: the disk does not take it; it is tried again.
        """
        begun = self.service.registry.begun(self.service.domain)
        if begun is None:
            return
        intention, number = begun
        share, rollout = float(intention.get("share", 0.0)), self.service.rollout()
        try:
            manifest = {} if number is None else self.service.registry.load(self.service.domain, number).manifest
        except VersionError as error:
            logger.warning("%s", error)
            number, manifest = None, {}
        if number is not None and rollout is not None:
            if number in (rollout.stable, rollout.canary):
                kinds = ("published", "canary")
                events = self.service.events.recent(steps=False)
                if not any(event["version"] == number and event["kind"] in kinds for event in events):
                    self._tell_put(number, share, manifest)
            elif (rollout.stable, rollout.canary, rollout.pinned) == (intention.get("parent"), None, False):
                logger.info("version %d was published and not put in service; now it is", number)
                self._put(number, rollout, share, manifest)
        self.service.finish()

    def decide(self, now: float) -> Judgement | None:
        """See ``CanaryWatch.decide``; candidates are compared with what was promoted."""
        judgement = self.watch.decide(now)
        if judgement is not None and judgement.action == "promote":
            self.in_service()
        return judgement

    def _take(self, version: Version) -> None:
        baseline = self._build(version.config)
        baseline.load_weights(version.weights)
        self._baseline, self.stable = baseline, version.number


def _waits(reason: str) -> Outcome:
    """Return the outcome of a candidate that could not be judged or put in service now."""
    return Outcome(GateDecision(False, True, reason), None)
