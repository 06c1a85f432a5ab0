"""When the drafter in training is proposed, when its canary is decided, and what live requests say of both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from redis.exceptions import RedisError

from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafters.trainable import Trainable
from osd.learning.batch import DistillBatch
from osd.learning.drift import Drift, DriftWatch
from osd.learning.gate import Gate, GateDecision
from osd.learning.online import Learner
from osd.learning.scores import KnownScores
from osd.registry.learnt import REQUESTS
from trainer.accounts import Accounts
from trainer.investor import Worth
from trainer.revision import TARGET, Revision
from trainer.rollout import WORTH, Publisher
from trainer.status import Status
from trainer.upstreams import Upstreams

logger = logging.getLogger(__name__)

_CANARY_SECONDS = 0.5
_NEW = 0  # in the place of the number that a version does not have yet


class StoppedError(Exception):
    """The loop was asked to end in the middle of an evaluation."""


class Candidates:
    """Takes the learner's candidates to the publisher, and follows the canary.

    ``spare`` waits until serving can spare the capacity for a micro-batch, and is False when the loop shall end;
    ``working`` takes note of each one's work. ``worth`` says what a candidate that passed is expected to save: one that
    saves less than it costs all replicas to take it up is not published, and trained on.
    ``target`` is the label of what it learns from; ``revision`` is there until the version in service was judged on it.
    """

    def __init__(
        self,
        publisher: Publisher,
        accounts: Accounts,
        spare: Callable[[], bool],
        working: Callable[[], AbstractContextManager[None]],
        worth: Callable[[Learner, GateDecision], Worth | None],
        target: str,
        fall: float,
        upstreams: Upstreams,
    ) -> None:
        self._publisher, self._accounts, self._upstreams = publisher, accounts, upstreams
        self._spare, self._working, self._worth = spare, working, worth
        self._target, self._fall = target, fall
        self.revision: Revision | None = None
        self._known: tuple[int, KnownScores] | None = None  # of the version in service, and its number
        self._looked = 0
        self._gate_after = 0.0
        self._canary_after = 0.0
        self._refused = False

    def due(self, learner: Learner) -> bool:
        """Whether it is time for a candidate."""
        return learner.due and time.monotonic() >= self._gate_after

    def propose(self, learner: Learner) -> bool:
        """Propose the drafter; a rejected one is trained on from where it is. False when nothing could be published.

        Raises:
            StoppedError: the loop shall end.
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        accounts, status = self._accounts, self._accounts.status
        counters, steps = learner.counters, learner.distiller.steps
        trained_on = {"records": counters.trained, "tokens": counters.tokens, "steps": steps}

        began, saving = accounts.cost.spent(), 0.0

        def judge(candidate: Trainable, baseline: Trainable) -> GateDecision:
            scores = self._scores(learner.gate, baseline)
            decision = learner.gate.judge(candidate, scores, lambda: self._held_out(learner))
            worth = self._worth(learner, decision) if decision.passed else None
            return decision if worth is None or worth.pays else held_back(decision, worth)

        def about(decision: GateDecision) -> dict[str, Any]:
            nonlocal saving
            manifest: dict[str, Any] = {"trained_on": trained_on, TARGET: self._target}
            manifest[REQUESTS] = accounts.learnt.state()
            if worth := self._worth(learner, decision):
                saving = worth.saving_rate
                manifest[WORTH] = worth.figures() | accounts.cost.spent().published(_NEW, saving).paybacks(_NEW)
            return manifest

        try:
            outcome = self._publisher.propose(learner.candidate(), judge, about)
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
        status.gate = {"passed": decision.passed, "reason": decision.reason, **decision.figures()}
        learner.judged(decision)
        learner.value.charged(accounts.cost.spent().total - began.total)
        if outcome.version is not None:
            accounts.published(outcome.version, self._publisher.stable, saving)
            accounts.cost.keep(self._publisher.retire())
        elif not decision.waits:
            status.rejected += 1
        return True

    def judged(self, learner: Learner) -> bool:
        """Whether training may begin, with the drafter in service judged as soon as enough is held out.

        What learning is worth depends on where it begins. Training waits for that where the drafter learnt from another
        revision of the target: where it fell by ``trainer.drift_fall`` it begins at once, from its weights; else it
        goes on.

        Raises:
            StoppedError: the loop shall end.
        """
        baseline, revision, held_out = self._publisher.baseline, self.revision, learner.counters.held_out
        if baseline is None or (revision is None and learner.value.length is not None):
            return True
        if held_out == self._looked:
            return revision is None
        self._looked = held_out
        now = learner.gate.look(self._scores(learner.gate, baseline), self._held_out(learner))
        if now is None:
            return revision is None
        learner.value.looked(now)
        if revision is None:
            return True
        self.revision = None
        service = self._publisher.service
        drift = revision.fallen(now, self._fall, service.domain)
        if drift is None:
            learner.trigger.resumed()
        else:
            learner.drifted(drift)
        ends = "it goes on" if drift is None else "training begins from its weights"
        reason = f"acceptance was {revision.before:.3f} and is {now.acceptance:.3f}: {ends}"
        logger.info("version %d learnt from another revision of the target: %s", revision.number, reason)
        service.tell("revision", revision.number, reason=reason, before=revision.before, now=now.acceptance)
        return True

    def decide(self) -> None:
        """Promote the canary or roll it back when live requests, upstreams or the clock say so."""
        for shown in self._upstreams.new():
            self._publisher.count(shown)
        canary = self._publisher.canary
        if canary is None or time.monotonic() < self._canary_after:
            return
        self._canary_after = time.monotonic() + _CANARY_SECONDS
        try:
            judgement = self._publisher.decide(time.monotonic())
        except (RedisError, OSError) as error:
            logger.warning("nothing is decided on the canary for now: %s", error)
            return
        if judgement is not None:
            figures = {"action": judgement.action, "reason": judgement.reason}
            self._accounts.status.canary = {**canary.figures(), **figures}

    def _scores(self, gate: Gate, baseline: Trainable) -> KnownScores:
        """How well the version in service predicts, which does not change from one candidate to the next."""
        number = self._publisher.stable
        if self._known is None or self._known[0] != number:
            self._known = number, KnownScores(baseline, gate.depth, gate.divergence)
        return self._known[1]

    def _held_out(self, learner: Learner) -> Iterator[DistillBatch]:
        """The held-out positions in micro-batches, each as soon as serving can spare it."""
        behind = True
        while behind:
            if not self._spare():
                raise StoppedError
            with self._working():
                behind = learner.catch_up()
        for batch in learner.held_out():
            if not self._spare():
                raise StoppedError
            with self._working():
                yield batch


def held_back(decision: GateDecision, worth: Worth) -> GateDecision:
    """The decision on a candidate that is good enough for service, and not worth that all replicas take it up."""
    saved, cost = worth.saving_rate * worth.horizon, worth.price * worth.uptake
    reason = f"it is expected to save {saved:.3g} seconds of a core, and taking it up costs replicas {cost:.3g}"
    return replace(decision, passed=False, reason=reason)


class LiveRequests:
    """Takes evidence on canary and drift from each live request; ``drifted`` is called at each fall of acceptance."""

    def __init__(
        self, settings: TrainerSettings, publisher: Publisher, status: Status, drifted: Callable[[Drift], None]
    ) -> None:
        self._drift = DriftWatch(settings.drift_fall, settings.drift_records)
        self._publisher, self._status, self._drifted = publisher, status, drifted

    def observe(self, trace: Trace) -> None:
        """Take in a request."""
        service = self._publisher.service
        if trace.drafter_domain == service.domain:
            self._publisher.observe(trace)
        drift = self._drift.add(trace)
        if drift is None:
            return
        logger.warning("acceptance of %s fell from %.3f to about %.3f", drift.domain, drift.before, drift.now)
        self._status.drifts += 1
        self._status.drift = asdict(drift)
        self._drifted(drift)
        figures = {"before": round(drift.before, 4), "now": round(drift.now, 4), "source": drift.domain}
        service.tell("drift", drift.version, **figures)
