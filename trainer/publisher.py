"""Publisher of a domain: from the stable version to a learner, and from the learner to the next version."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from redis.exceptions import RedisError

from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.economy.effect import KNOWN_WIDTH
from osd.economy.report import RECALL_ALONE, Measured
from osd.learning.batch import DistillBatch
from osd.learning.drift import Drift, DriftWatch
from osd.learning.evaluation import CachedScorer, GateFigures
from osd.learning.gate import Gate, GateDecision
from osd.learning.online import Learner
from osd.registry.trained_requests import REQUESTS
from osd.registry.training import VersionEffect
from osd.registry.versions import Version
from trainer.budget import TrainingBudget
from trainer.canary import CanaryTrial, MeasuredEffects, Upstreams
from trainer.live_drafts import LiveDrafts
from trainer.reporter import TrainingReporter
from trainer.rollout import COST, Promotion

logger = logging.getLogger(__name__)

TARGET = "target"
"""Manifest field with the label of the target that the version was trained on."""

_CANARY_SECONDS = 0.5


class StoppedError(Exception):
    """Stop of the worker during an evaluation."""


class NotYetError(Exception):
    """Lack of a version to start from; the message gives the reason."""


@dataclass(frozen=True)
class Revision:
    """Version that was trained on another revision of the target.

    Attributes:
        number: the version.
        before: its acceptance rate on that revision, from the gate.
    """

    number: int
    before: float

    @classmethod
    def of(cls, version: Version, target: str) -> Revision | None:
        """Return the revision of a version for ``target``; None when it was trained on it, or on nothing."""
        gate = version.manifest.get("gate") or {}
        if version.manifest.get(TARGET, target) == target or "acceptance" not in gate:
            return None
        return cls(version.number, float(gate["acceptance"]))

    def drift(self, now: GateFigures, max_fall: float, domain: str) -> Drift | None:
        """Return the fall of the acceptance rate on the new target; None when it is at most ``max_fall``."""
        # NaN counts as a fall.
        holds = now.acceptance >= self.before - max_fall
        return None if holds else Drift(domain, self.number, self.before, now.acceptance)


class Publisher:
    """Publisher of one domain: loads the stable version, proposes the learner's candidates, decides on the canary.

    Attributes:
        live: acceptance of live requests.
    """

    def __init__(
        self,
        promotion: Promotion,
        settings: TrainerSettings,
        target: str,
        budget: TrainingBudget,
        reporter: TrainingReporter,
        upstreams: Upstreams,
        effects: MeasuredEffects,
        spare: Callable[[], bool],
    ) -> None:
        """Create a publisher for learners on the target with the label ``target``.

        ``spare`` waits until serving leaves capacity for a micro-batch, and returns False when the worker must end.
        """
        self._promotion, self._budget, self._reporter, self._upstreams = promotion, budget, reporter, upstreams
        self._effects = effects
        self._spare, self._target, self._max_fall = spare, target, settings.drift_fall
        self.live = LiveDrafts()
        self._drift = DriftWatch(settings.drift_fall, settings.drift_records)
        self._revision: Revision | None = None  # until the stable version is evaluated on this target
        self._cached_scores: tuple[int, CachedScorer] | None = None  # number and scores of the stable version
        self._held_out_seen = 0
        self._gate_after = 0.0
        self._canary_after = 0.0
        self._refused = False
        # By version: the logarithm of the gain that the gate measured, and the effect that the trial measured.
        self._promised: dict[int, float] = {}
        self._measured: dict[int, Measured] = {}

    @property
    def stable(self) -> int:
        """Number of the stable version."""
        return self._promotion.stable

    @property
    def canary(self) -> CanaryTrial | None:
        """Current canary trial; None without one."""
        return self._promotion.watch.canary

    def acquire_version(self) -> Version:
        """Take the domain's lease and return the stable version.

        Raises:
            NotYetError: another trainer has the lease, there is no version, or Redis or the registry cannot be reached.
        """
        versions = self._promotion.versions
        try:
            rollout = versions.rollout()
            if rollout is not None and not versions.lease.take(rollout):
                raise NotYetError(f"another trainer trains {versions.domain}")
            version = self._promotion.load_stable()
        except RedisError as error:
            raise NotYetError(f"Redis cannot be reached: {error}") from error
        except OSError as error:
            raise NotYetError(f"the registry cannot be read or written: {error}") from error
        if version is None:
            raise NotYetError(f"the registry has no stable drafter version of {versions.domain} yet")
        return version

    def start_training(self, version: Version, resumed: bool) -> None:
        """Remove old versions, and note whether ``version`` was trained on another target.

        A version of another target is evaluated on this target before other candidates. With ``resumed`` the learner
        continues from a checkpoint, and the earlier note stays.
        """
        if not resumed:
            self._revision = Revision.of(version, self._target)
        self._promotion.retire()

    def update_reports(self) -> None:
        """Update the reported version, the fund and the measured effect of the trial."""
        reporter, canary = self._reporter, self.canary
        reporter.state.version = self.stable
        reporter.fund.follow(self.stable, self._promised.get(self.stable, 0.0))
        reporter.fund.measure(self._measured)
        reporter.trial = None if canary is None else version_effect(canary.version, canary.stable, canary.measured)

    def observe(self, trace: Trace, learner: Learner) -> None:
        """Count a live request as evidence on the canary and on drift; on drift start training at once."""
        versions = self._promotion.versions
        if trace.drafter_domain == versions.domain:
            self.live.add(trace)
            self._promotion.watch.observe(trace, self._upstreams.traced)
        drift = self._drift.add(trace)
        if drift is None:
            return
        logger.warning("acceptance of %s fell from %.3f to about %.3f", drift.domain, drift.before, drift.now)
        state = self._reporter.state
        state.drifts += 1
        state.drift = asdict(drift)
        learner.on_drift(drift)
        self._reporter.fund.drift()
        figures = {"before": round(drift.before, 4), "now": round(drift.now, 4), "source": drift.domain}
        versions.record_event("drift", drift.version, **figures)

    def due(self, learner: Learner) -> bool:
        """Return whether a candidate is due and the pause after a failed proposal is over."""
        return learner.due and time.monotonic() >= self._gate_after

    def propose(self, learner: Learner) -> bool:
        """Propose the learner's drafter; after a rejection training continues with it.

        Returns:
            False when the proposal failed because Redis, the registry or the disk did; it is tried again later.

        Raises:
            StoppedError: the worker must end.
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        reporter, state = self._reporter, self._reporter.state
        counters, steps = learner.counters, learner.distiller.steps
        trained_on = {"records": counters.trained, "tokens": counters.tokens, "steps": steps}

        def judge(candidate: Trainable, baseline: Trainable) -> GateDecision:
            scores = self._scores(learner.gate, baseline)
            # Each version costs a swap and its measurement, and replicas cannot measure smaller gains.
            return learner.gate.judge(candidate, scores, lambda: self._held_out(learner)).with_least_gain(KNOWN_WIDTH)

        def describe(decision: GateDecision) -> dict[str, Any]:
            manifest: dict[str, Any] = {"trained_on": trained_on, TARGET: self._target}
            manifest[REQUESTS] = reporter.trained_requests.state()
            cost = reporter.cost.current()
            seconds = {"core_seconds": cost.unpublished, "training_seconds": cost.total}
            seconds |= {"beside_seconds": cost.contended + cost.slowed, "certain_seconds": reporter.fund.certain}
            manifest[COST] = {name: round(value, 1) for name, value in seconds.items()}
            return manifest

        try:
            outcome = self._promotion.propose(learner.candidate(), judge, describe)
        except RedisError as error:
            logger.warning("no candidate can be published while Redis is down: %s", error)
            self._gate_after = time.monotonic() + 2.0
            return False
        except (ValueError, OSError) as error:
            if not self._refused:  # log a full disk only once
                logger.error("a candidate could not be published, the next try is in 10 s: %s", error)
            self._refused = True
            self._gate_after = time.monotonic() + 10.0
            return False
        self._refused = False
        decision = outcome.decision
        logger.info("candidate at step %d: %s", steps, decision.reason)
        state.gate = {"passed": decision.passed, "reason": decision.reason, **decision.figures()}
        learner.on_decision(decision)
        if outcome.version is not None:
            self._promised[outcome.version] = learner.log_gain or 0.0
            reporter.record_publication(self._promotion.stable)
            self._budget.investor.charge_swap()
            self._promotion.retire()
        elif not decision.waits:
            state.rejected += 1
        if not decision.waits:
            reporter.fund.end_slice()
        self.update_reports()
        return True

    def may_train(self, learner: Learner) -> bool:
        """Return whether training may start.

        When the drafter was trained on another revision of the target, training waits until enough held-out positions
        exist to evaluate the stable version. If its acceptance rate fell by ``trainer.drift_fall``, training starts at
        once from its weights. Otherwise training continues as usual.

        Raises:
            StoppedError: the worker must end.
        """
        baseline, revision, held_out = self._promotion.baseline, self._revision, learner.counters.held_out
        if baseline is None or revision is None:
            return True
        if held_out == self._held_out_seen:
            return False
        self._held_out_seen = held_out
        now = learner.gate.evaluate(self._scores(learner.gate, baseline), self._held_out(learner))
        if now is None:
            return False
        self._revision = None
        versions = self._promotion.versions
        drift = revision.drift(now, self._max_fall, versions.domain)
        if drift is None:
            learner.trigger.on_resume()
        else:
            learner.on_drift(drift)
            self._reporter.fund.drift()
        action = "training continues" if drift is None else "training starts from its weights"
        reason = f"acceptance was {revision.before:.3f} and is {now.acceptance:.3f}: {action}"
        logger.info("version %d was trained on another revision of the target: %s", revision.number, reason)
        versions.record_event("revision", revision.number, reason=reason, before=revision.before, now=now.acceptance)
        return True

    def decide_canary(self) -> None:
        """Promote the canary or roll it back by measurements, live requests, upstreams or the time limit."""
        for evidence in self._upstreams.new():
            self._promotion.watch.count(evidence)
        canary = self._promotion.watch.canary
        if canary is None or time.monotonic() < self._canary_after:
            return
        self._canary_after = time.monotonic() + _CANARY_SECONDS
        canary.measured = self._effects.of(canary.version, canary.stable) or canary.measured
        if canary.measured is not None:
            self._measured[canary.version] = canary.measured
        try:
            judgement = self._promotion.decide(time.monotonic())
        except (RedisError, OSError) as error:
            logger.warning("the canary cannot be decided on now, the next try follows: %s", error)
            return
        if judgement is not None:
            figures = {"action": judgement.action, "reason": judgement.reason}
            self._reporter.state.canary = {**canary.figures(), **figures}

    def follow_effect(self) -> None:
        """Take in the measured effects of the version in service; take the version back if it is certainly slower."""
        parent, stable = self._promotion.parent, self.stable
        alone = self._effects.of(stable, RECALL_ALONE)
        self._reporter.over_recall = None if alone is None else version_effect(stable, RECALL_ALONE, alone)
        if alone is not None:
            self._reporter.fund.measure_mixed(alone)
        if parent is None or self.canary is not None:
            return
        measured = self._effects.of(stable, parent)
        if measured is None or (effect := measured.effect) is None:
            return
        self._measured[stable] = measured
        if effect.log + effect.width >= 0:
            return
        try:
            self._promotion.take_back(effect)
        except (RedisError, OSError) as error:
            logger.warning("version %d cannot be taken back now, the next try follows: %s", stable, error)

    def _scores(self, gate: Gate, baseline: Trainable) -> CachedScorer:
        """Return the scores of the stable version, which are the same for all candidates."""
        number = self._promotion.stable
        if self._cached_scores is None or self._cached_scores[0] != number:
            self._cached_scores = number, CachedScorer(baseline, gate.depth, gate.divergence)
        return self._cached_scores[1]

    def _held_out(self, learner: Learner) -> Iterator[DistillBatch]:
        """Yield the held-out positions in micro-batches, each after a wait for spare capacity."""
        remaining = True
        while remaining:
            if not self._spare():
                raise StoppedError
            with self._budget.working():
                remaining = learner.catch_up()
        for batch in learner.held_out():
            if not self._spare():
                raise StoppedError
            with self._budget.working():
                yield batch


def version_effect(number: int, before: int, measured: Measured | None) -> VersionEffect:
    """Return the measured effect of a version over another, for reports."""
    if measured is None:
        return VersionEffect(number, before)
    if (effect := measured.effect) is None:
        return VersionEffect(number, before, resting=measured.guarded)
    width = effect.width if math.isfinite(effect.width) else None
    return VersionEffect(number, before, effect.log, width, effect.trials, measured.guarded)
