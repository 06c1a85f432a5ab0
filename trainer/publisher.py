"""The publisher of a domain: from the version in service to a learner, and from a learner to the next version."""

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
from osd.economy.report import Measured
from osd.learning.batch import DistillBatch
from osd.learning.drift import Drift, DriftWatch
from osd.learning.evaluation import GateFigures, KnownScores
from osd.learning.gate import Gate, GateDecision
from osd.learning.online import Learner
from osd.registry.learnt import REQUESTS
from osd.registry.training import VersionEffect
from osd.registry.versions import Version
from trainer.budget import TrainingBudget
from trainer.canary import Canary, MeasuredEffects, Upstreams
from trainer.reporter import TrainingReporter
from trainer.rollout import COST, Promotion

logger = logging.getLogger(__name__)

TARGET = "target"
"""The manifest's label of the target that a version learnt from."""

_CANARY_SECONDS = 0.5


class StoppedError(Exception):
    """The loop was asked to end in the middle of an evaluation."""


class NotYetError(Exception):
    """There is no version to begin with now; the message says why."""


@dataclass(frozen=True)
class Revision:
    """Version ``number`` learnt from another target, on which its acceptance rate was ``before`` by the gate."""

    number: int
    before: float

    @classmethod
    def of(cls, version: Version, target: str) -> Revision | None:
        """Return what ``version`` is judged for on ``target``; None where it learnt from that, or from nothing."""
        gate = version.manifest.get("gate") or {}
        if version.manifest.get(TARGET, target) == target or "acceptance" not in gate:
            return None
        return cls(version.number, float(gate["acceptance"]))

    def fallen(self, now: GateFigures, fall: float, domain: str) -> Drift | None:
        """Return how far acceptance fell on the new target, None where that is less than ``fall``."""
        # Written so that a comparison with NaN is a fall.
        helps = now.acceptance >= self.before - fall
        return None if helps else Drift(domain, self.number, self.before, now.acceptance)


class Publisher:
    """Takes up the version in service, proposes the learner's candidates, and follows the canary.

    ``spare`` waits until serving can spare the capacity for a micro-batch, and returns False when the loop shall end.
    ``target`` is the label of the target that the learner learns from.
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
        self._promotion, self._budget, self._reporter, self._upstreams = promotion, budget, reporter, upstreams
        self._effects = effects
        self._spare, self._target, self._fall = spare, target, settings.drift_fall
        self._drift = DriftWatch(settings.drift_fall, settings.drift_records)
        self._revision: Revision | None = None  # until the version in service was judged on this target
        self._known: tuple[int, KnownScores] | None = None  # of the version in service, and its number
        self._looked = 0
        self._gate_after = 0.0
        self._canary_after = 0.0
        self._refused = False
        # By version, the logarithm of the gain that its gate saw, and its effect as its trial measured it.
        self._promised: dict[int, float] = {}
        self._measured: dict[int, Measured] = {}

    @property
    def stable(self) -> int:
        """Number of the version in service."""
        return self._promotion.stable

    @property
    def canary(self) -> Canary | None:
        """The canary under way, None where there is none."""
        return self._promotion.watch.canary

    def take_up(self) -> Version:
        """Take the domain's lease; return the version in service.

        Raises:
            NotYetError: another trainer has the lease, there is no version, or something cannot be reached.
        """
        service = self._promotion.service
        try:
            rollout = service.rollout()
            if rollout is not None and not service.lease.take(rollout):
                raise NotYetError(f"another trainer has {service.domain}")
            version = self._promotion.in_service()
        except RedisError as error:
            raise NotYetError(f"Redis cannot be reached: {error}") from error
        except OSError as error:
            raise NotYetError(f"the registry cannot be read or written: {error}") from error
        if version is None:
            raise NotYetError(f"the registry has no drafter version of {service.domain} in service yet")
        return version

    def begun(self, version: Version, resumed: bool) -> None:
        """Take note that training begins with a version, or goes on from a checkpoint (``resumed``)."""
        if not resumed:
            self._revision = Revision.of(version, self._target)
        self._promotion.retire()

    def follow(self) -> None:
        """Tell the state and the fund which version is in service, and the reporter of a trial."""
        reporter, canary = self._reporter, self.canary
        reporter.state.version = self.stable
        reporter.fund.follow(self.stable, self._promised.get(self.stable, 0.0))
        reporter.fund.measure(self._measured)
        reporter.trial = None if canary is None else trial_of(canary)

    def observe(self, trace: Trace, learner: Learner) -> None:
        """Take in a live request, as evidence on the canary and on drift; after a fall the learner learns at once."""
        service = self._promotion.service
        if trace.drafter_domain == service.domain:
            self._promotion.watch.observe(trace)
        drift = self._drift.add(trace)
        if drift is None:
            return
        logger.warning("acceptance of %s fell from %.3f to about %.3f", drift.domain, drift.before, drift.now)
        state = self._reporter.state
        state.drifts += 1
        state.drift = asdict(drift)
        learner.drifted(drift)
        self._reporter.fund.drift()
        figures = {"before": round(drift.before, 4), "now": round(drift.now, 4), "source": drift.domain}
        service.tell("drift", drift.version, **figures)

    def due(self, learner: Learner) -> bool:
        """Whether it is time for a candidate."""
        return learner.due and time.monotonic() >= self._gate_after

    def propose(self, learner: Learner) -> bool:
        """Propose the drafter; a rejected one is trained on from where it is. False when nothing could be published.

        Raises:
            StoppedError: the loop shall end.
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        reporter, state = self._reporter, self._reporter.state
        counters, steps = learner.counters, learner.distiller.steps
        trained_on = {"records": counters.trained, "tokens": counters.tokens, "steps": steps}

        def judge(candidate: Trainable, baseline: Trainable) -> GateDecision:
            scores = self._scores(learner.gate, baseline)
            return learner.gate.judge(candidate, scores, lambda: self._held_out(learner))

        def about(decision: GateDecision) -> dict[str, Any]:
            manifest: dict[str, Any] = {"trained_on": trained_on, TARGET: self._target}
            manifest[REQUESTS] = reporter.learnt.state()
            spent = reporter.cost.spent()
            seconds = {"core_seconds": spent.unpublished, "training_seconds": spent.total}
            seconds |= {"beside_seconds": spent.beside + spent.slowed, "certain_seconds": reporter.fund.certain}
            manifest[COST] = {name: round(value, 1) for name, value in seconds.items()}
            return manifest

        try:
            outcome = self._promotion.propose(learner.candidate(), judge, about)
        except RedisError as error:
            logger.warning("no candidate is published while Redis is gone: %s", error)
            self._gate_after = time.monotonic() + 2.0
            return False
        except (ValueError, OSError) as error:
            if not self._refused:  # a full disk stays so for a while
                logger.error("a candidate could not be published, trying again: %s", error)
            self._refused = True
            self._gate_after = time.monotonic() + 10.0
            return False
        self._refused = False
        decision = outcome.decision
        logger.info("candidate at step %d: %s", steps, decision.reason)
        state.gate = {"passed": decision.passed, "reason": decision.reason, **decision.figures()}
        learner.judged(decision)
        if outcome.version is not None:
            self._promised[outcome.version] = learner.promised or 0.0
            reporter.published(self._promotion.stable)
            self._budget.investor.taken_up()
            self._promotion.retire()
        elif not decision.waits:
            state.rejected += 1
        if not decision.waits:
            reporter.fund.end_slice()
        self.follow()
        return True

    def judged(self, learner: Learner) -> bool:
        """Whether training may begin.

        Where the drafter learnt from another revision of the target, training waits until enough is held out to judge
        the drafter in service. Where that fell by ``trainer.drift_fall`` it begins at once, from its weights; else it
        goes on.

        Raises:
            StoppedError: the loop shall end.
        """
        baseline, revision, held_out = self._promotion.baseline, self._revision, learner.counters.held_out
        if baseline is None or revision is None:
            return True
        if held_out == self._looked:
            return False
        self._looked = held_out
        now = learner.gate.look(self._scores(learner.gate, baseline), self._held_out(learner))
        if now is None:
            return False
        self._revision = None
        service = self._promotion.service
        drift = revision.fallen(now, self._fall, service.domain)
        if drift is None:
            learner.trigger.resumed()
        else:
            learner.drifted(drift)
            self._reporter.fund.drift()
        ends = "it goes on" if drift is None else "training begins from its weights"
        reason = f"acceptance was {revision.before:.3f} and is {now.acceptance:.3f}: {ends}"
        logger.info("version %d learnt from another revision of the target: %s", revision.number, reason)
        service.tell("revision", revision.number, reason=reason, before=revision.before, now=now.acceptance)
        return True

    def decide(self) -> None:
        """Promote the canary or roll it back when measurements, live requests, upstreams or the clock say so."""
        for shown in self._upstreams.new():
            self._promotion.watch.count(shown)
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
            logger.warning("nothing is decided on the canary for now: %s", error)
            return
        if judgement is not None:
            figures = {"action": judgement.action, "reason": judgement.reason}
            self._reporter.state.canary = {**canary.figures(), **figures}

    def _scores(self, gate: Gate, baseline: Trainable) -> KnownScores:
        """How well the version in service predicts, which does not change from one candidate to the next."""
        number = self._promotion.stable
        if self._known is None or self._known[0] != number:
            self._known = number, KnownScores(baseline, gate.depth, gate.divergence)
        return self._known[1]

    def _held_out(self, learner: Learner) -> Iterator[DistillBatch]:
        """The held-out positions in micro-batches, each as soon as serving can spare it."""
        behind = True
        while behind:
            if not self._spare():
                raise StoppedError
            with self._budget.working():
                behind = learner.catch_up()
        for batch in learner.held_out():
            if not self._spare():
                raise StoppedError
            with self._budget.working():
                yield batch


def trial_of(canary: Canary) -> VersionEffect:
    """Return the measured effect of a canary over the stable version, as reports show it."""
    effect = None if canary.measured is None else canary.measured.effect
    if effect is None:
        return VersionEffect(canary.version, canary.stable)
    width = effect.width if math.isfinite(effect.width) else None
    return VersionEffect(canary.version, canary.stable, effect.log, width, effect.trials)
