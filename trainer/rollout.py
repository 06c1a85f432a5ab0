"""Rollout of a trained drafter: gate, registry, canary, rollout pointer.

    candidate --gate--> version --canary--> stable       (with ``trainer.canary_share`` 0: version --> stable)
        |                  |                  '--> taken back: certainly slower than its parent
        |                  '--> rolled back: worse, corrupt, or undecided at the time limit
        '--> rejected: stays in the trainer

The pointer holds the state; a restart loses only the evidence. A trainer that takes over watches the canary that the
pointer names, until the same time limit. A pointer that another process moved stays as it is.
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
from osd.economy.effect import Effect
from osd.learning.gate import GateDecision
from osd.registry.events import Events, Kind
from osd.registry.lease import Lease
from osd.registry.pointer import Pointer, Rollout
from osd.registry.retention import retire
from osd.registry.versions import Registry, Version, VersionError
from trainer.canary import CanaryTrial, Evidence, Judgement, expected_rate, speed_figures
from trainer.executor import Build

logger = logging.getLogger(__name__)

_RECALL = "recall"
_REMEMBERED = 600  # seconds of upstreams, or traced requests of upstreams

GateCheck = Callable[[Trainable, Trainable], GateDecision]
"""Function that evaluates a candidate against the drafter in service with the gate."""

ManifestDetails = Callable[[GateDecision], dict[str, Any]]
"""Function that returns the manifest fields of a candidate that passed: training data and cost."""

COST = "cost"
"""Manifest field with the core seconds of training.

It has those of the version, those of the domain so far, and the part of these that ran while requests ran.
"""


@dataclass(frozen=True)
class CandidateOutcome:
    """Result of a proposal.

    Attributes:
        decision: the decision of the gate.
        version: the number of the published version; None when nothing was published.
    """

    decision: GateDecision
    version: int | None


@dataclass(frozen=True)
class DomainVersions:
    """Versions of one domain: registry, rollout pointer, events, and the lease that permits changes.

    Every change raises ``osd.registry.pointer.FencedError`` when another trainer has taken over the domain.
    """

    domain: str
    registry: Registry
    pointer: Pointer
    events: Events
    lease: Lease

    def rollout(self) -> Rollout | None:
        """Return the rollout that the pointer names."""
        return self.pointer.get(self.domain)

    def move_pointer(self, before: Rollout | None, rollout: Rollout) -> bool:
        """Move the pointer if it is still ``before``; return False when another process has moved it."""
        return self.pointer.replace(self.domain, before, rollout, self.lease.fence)

    def finish(self) -> None:
        """Delete the registry's record of an intention that is completed or given up, see ``Registry.begin``."""
        with self.lease.held():
            self.registry.finish(self.domain)

    def recall_snapshot(self) -> dict[str, str]:
        """Return the hash of the latest n-gram cache snapshot as ``recall``; nothing without a snapshot."""
        snapshot = Snapshots(self.registry.root).about(self.domain)
        return {} if snapshot is None else {_RECALL: snapshot.sha256}

    def record_event(self, kind: Kind, version: int | None, **figures: Any) -> None:
        """Add an event to the list; without Redis only log it."""
        self.events.try_add(kind, self.domain, version, **figures)

    def close(self) -> None:
        """Close the connections of pointer and events; the lease stays as it is."""
        self.pointer.close()
        self.events.close()


class CanaryWatch:
    """Collector of evidence on the canary that the pointer names, which promotes it or rolls it back."""

    def __init__(self, versions: DomainVersions, seconds: float) -> None:
        """Create a watch for trials of at most ``seconds``."""
        self._versions, self._seconds = versions, seconds
        self._counted: deque[Evidence] = deque(maxlen=_REMEMBERED)
        self.canary: CanaryTrial | None = None

    def follow(self, rollout: Rollout) -> None:
        """Start a trial of the canary that the pointer names; keep a running trial of the same canary."""
        if rollout.canary is None:
            self.canary = None
            return
        if self.canary is not None and (self.canary.version, self.canary.stable) == (rollout.canary, rollout.stable):
            return
        try:
            gate = self._versions.registry.load(self._versions.domain, rollout.canary).manifest.get("gate", {})
        except VersionError as error:
            logger.warning("%s", error)
            gate = {}
        expected = expected_rate(gate.get("per_depth", []))
        # The wall clock, which may be set, measures only the time before this trainer started to watch.
        elapsed = min(max(time.time() - rollout.changed, 0.0), self._seconds)
        ends = time.monotonic() + self._seconds - elapsed
        self.canary = CanaryTrial(rollout.canary, rollout.stable, expected, ends)
        for evidence in self._counted:
            self.canary.count(evidence)

    def observe(self, trace: Trace, from_upstream: bool = False) -> None:
        """Count a live request as evidence on the canary."""
        if from_upstream:
            self.count(Evidence.of(trace))
        elif self.canary is not None:
            self.canary.add(trace)

    def count(self, evidence: Evidence) -> None:
        """Count evidence from an upstream.

        An upstream runs one drafter at a time. So evidence from before the canary is kept for the stable version.
        """
        self._counted.append(evidence)
        if self.canary is not None:
            self.canary.count(evidence)

    def decide(self, now: float) -> Judgement | None:
        """Promote the canary or roll it back; return the decision, or None without a canary.

        ``now`` is in seconds of the monotonic clock.

        Raises:
            redis.exceptions.RedisError: Redis is down; nothing was decided.
            OSError: the disk cannot be written; nothing was decided.
        """
        canary, versions = self.canary, self._versions
        if canary is None:
            return None
        judgement = canary.judge(now)
        if judgement.action == "watch":
            return judgement
        promoted = judgement.action == "promote"
        number = canary.version if promoted else canary.stable
        rollout = versions.rollout()
        decided = Rollout(stable=number, canary=None, share=0.0, changed=time.time())
        if (
            rollout is None
            or (rollout.stable, rollout.canary) != (canary.stable, canary.version)
            or not versions.move_pointer(rollout, decided)
        ):
            logger.info("version %d is no longer a canary: another process moved the rollout pointer", canary.version)
            self.canary = None
            return Judgement("watch", "the rollout pointer was moved")
        self.canary = None
        figures = {"reason": judgement.reason, **canary.figures(), **versions.recall_snapshot()}
        if promoted:
            versions.record_event("promoted", number, parent=canary.stable, **figures)
        else:
            versions.record_event("rolled_back", number, previous=canary.version, **figures)
        logger.info("version %d, %s: %s", canary.version, judgement.action, judgement.reason)
        return judgement


class Promotion:
    """Rollout of one domain's candidates: gate and canary against the version that the pointer names.

    Attributes:
        stable: the version that candidates are compared with; 0 before the pointer was read.
        parent: the version that ``stable`` was trained from; None if ``stable`` is the first version, or if its
            manifest names no parent.
        watch: the trial of the canary.
    """

    def __init__(self, versions: DomainVersions, settings: TrainerSettings, build: Build, keep: int) -> None:
        """Create the rollout of a domain, which keeps the newest ``keep`` versions on disk."""
        self.versions, self._settings, self._build, self._keep = versions, settings, build, keep
        self.watch = CanaryWatch(versions, settings.canary_seconds)
        self._baseline: Trainable | None = None
        self.stable = 0
        self.parent: int | None = None

    @property
    def baseline(self) -> Trainable | None:
        """Drafter of the version ``stable``; None before the pointer was read."""
        return self._baseline

    def load_stable(self) -> Version | None:
        """Return the stable version, or the newest older version that can be read; None without one.

        Also starts the trial of the canary that the pointer names.

        Raises:
            redis.exceptions.RedisError, OSError: the pointer cannot be read, or an interrupted publication cannot be
            finished.
        """
        self._finish_publication()
        rollout = self.versions.rollout()
        if rollout is None:
            return None
        self.watch.follow(rollout)
        for number in reversed(self.versions.registry.numbers(self.versions.domain)):
            if number > rollout.stable:
                continue
            try:
                version = self.versions.registry.load(self.versions.domain, number)
            except VersionError as error:
                logger.warning("%s", error)
                continue
            self._set_baseline(version)
            return version
        return None

    def propose(self, candidate: Trainable, judge: GateCheck, describe: ManifestDetails) -> CandidateOutcome:
        """Evaluate a candidate, and publish it when it passes the gate, as a canary or directly as the stable version.

        ``describe`` returns the manifest fields of a candidate that passed.

        Raises:
            redis.exceptions.RedisError: Redis is down; the rollout pointer was not moved.
            osd.registry.versions.VersionError: the registry refuses the version.
            OSError: the disk cannot be written.
        """
        versions = self.versions
        self._finish_publication()
        before = self.versions.rollout()
        if before is not None:
            self.watch.follow(before)
        if self._baseline is None or (before is not None and before.stable != self.stable):
            self.load_stable()
        if before is not None and before.pinned:
            return _waiting(f"version {before.stable} is pinned")
        if self._baseline is None:
            return _waiting(f"no drafter version of {versions.domain} to compare with")
        if self.watch.canary is not None:
            return _waiting(f"version {self.watch.canary.version} is still a canary")
        recall_snapshot = versions.recall_snapshot()
        decision = judge(candidate, self._baseline)
        if not decision.passed:
            if not decision.waits:
                # A candidate has no number before it is published.
                versions.record_event(
                    "rejected", None, parent=self.stable, reason=decision.reason, **decision.figures()
                )
            return CandidateOutcome(decision, None)
        # A move by another process counts, even one back to the same version; the next candidate is compared with it.
        pointer_moved = _waiting("the rollout pointer moved during the evaluation")
        if versions.rollout() != before:
            return pointer_moved
        share = self._settings.canary_share
        intention = {"parent": self.stable, "share": share}
        attempt = versions.registry.begin(versions.domain, intention, versions.lease.held())
        manifest = {
            **describe(decision),
            "parent": self.stable,
            "gate": decision.figures(),
            "attempt": attempt,
            **recall_snapshot,
        }
        number = versions.registry.publish(
            versions.domain, candidate.weights(), candidate.config(), manifest, versions.lease.held()
        )
        if not self._deploy(number, before, share, manifest):
            return pointer_moved
        if not share:
            self._baseline.load_weights(candidate.weights())
            self.stable, self.parent = number, self.stable
        return CandidateOutcome(decision, number)

    def _deploy(self, number: int, before: Rollout | None, share: float, manifest: dict[str, Any]) -> bool:
        """Move the pointer to a published version; return False when another process moved it from ``before``."""
        stable = manifest["parent"] if share else number
        rollout = Rollout(stable=stable, canary=number if share else None, share=share, changed=time.time())
        deployed = self.versions.move_pointer(before, rollout)
        if deployed:
            self.watch.follow(rollout)
            self._record_deployment(number, share, manifest)
        self.versions.finish()
        return deployed

    def retire(self) -> list[int]:
        """Remove old versions; return the numbers of the remaining versions."""
        versions = self.versions
        try:
            return retire(versions.registry, versions.domain, self._keep, versions.lease.held())
        except OSError as error:
            logger.warning("old versions of %s are not removed: %s", versions.domain, error)
            return versions.registry.numbers(versions.domain)

    def _record_deployment(self, number: int, share: float, manifest: dict[str, Any]) -> None:
        kind, figures = ("canary", {"share": share}) if share else ("published", {"trained_on": manifest["trained_on"]})
        figures = {**manifest.get(COST, {}), **figures}
        recall_snapshot = {name: manifest[name] for name in (_RECALL,) if name in manifest}
        figures |= {**manifest["gate"], **recall_snapshot}
        self.versions.record_event(kind, number, parent=manifest["parent"], **figures)

    def _finish_publication(self) -> None:
        """Finish a publication that an earlier trainer started and did not put in service.

        Raises:
            redis.exceptions.RedisError: Redis is down; the next call tries again.
            OSError: the disk cannot be written; the next call tries again.
        """
        publication = self.versions.registry.unfinished(self.versions.domain)
        if publication is None:
            return
        intention, number = publication
        share, rollout = float(intention.get("share", 0.0)), self.versions.rollout()
        try:
            manifest = {} if number is None else self.versions.registry.load(self.versions.domain, number).manifest
        except VersionError as error:
            logger.warning("%s", error)
            number, manifest = None, {}
        if number is not None and rollout is not None:
            if number in (rollout.stable, rollout.canary):
                kinds = ("published", "canary")
                events = self.versions.events.recent(steps=False)
                if not any(event["version"] == number and event["kind"] in kinds for event in events):
                    self._record_deployment(number, share, manifest)
            elif (rollout.stable, rollout.canary, rollout.pinned) == (intention.get("parent"), None, False):
                logger.info("version %d was published but not put in service: it is put in service now", number)
                self._deploy(number, rollout, share, manifest)
        self.versions.finish()

    def decide(self, now: float) -> Judgement | None:
        """Decide on the canary, see ``CanaryWatch.decide``; a promoted version becomes the baseline."""
        judgement = self.watch.decide(now)
        if judgement is not None and judgement.action == "promote":
            self.load_stable()
        return judgement

    def take_back(self, effect: Effect) -> None:
        """Put the parent of the stable version in service again, because the stable version is slower.

        Nothing happens if an operator has pinned the version, another process has moved the pointer, or the parent is
        unknown or removed.

        Args:
            effect: measured loss of the stable version over its parent, for the event and the log.

        Raises:
            redis.exceptions.RedisError: Redis is down; the pointer was not moved.
            OSError: the disk cannot be written; the pointer was not moved.
        """
        versions, rollout, number, parent = self.versions, self.versions.rollout(), self.stable, self.parent
        moved = rollout is None or rollout.pinned or (rollout.stable, rollout.canary) != (number, None)
        if moved or parent not in versions.registry.numbers(versions.domain):
            return
        if not versions.move_pointer(rollout, Rollout(stable=parent, canary=None, share=0.0, changed=time.time())):
            return
        reason = f"slower: speed {effect.percent} against version {parent}"
        versions.record_event("rolled_back", parent, previous=number, reason=reason, **speed_figures(effect))
        logger.info("version %d, roll_back: %s", number, reason)
        self.load_stable()

    def _set_baseline(self, version: Version) -> None:
        baseline = self._build(version.config)
        baseline.load_weights(version.weights)
        self._baseline, self.stable, self.parent = baseline, version.number, version.manifest.get("parent")


def _waiting(reason: str) -> CandidateOutcome:
    """Return the outcome of a candidate that could not be judged or put in service now."""
    return CandidateOutcome(GateDecision(False, True, reason), None)
