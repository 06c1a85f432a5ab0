"""Training loop of one domain: stream, micro-steps, gate, publication. It does not use Ray."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from osd.config import Settings
from osd.learning.online import Learner
from osd.registry.lease import HasOtherTrainer, Lease
from osd.registry.object_storage import storage_of
from osd.registry.pointer import FencedError, Pointer
from osd.registry.pointer_file import PointerFiles
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.training import TrainingReports
from osd.registry.versions import Registry
from trainer import tracking
from trainer.budget import TrainingBudget
from trainer.canary import MeasuredEffects, Upstreams
from trainer.capacity import lower_priority
from trainer.checkpoint import Checkpoints
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import TargetContext
from trainer.intake import Intake
from trainer.publisher import NotYetError, Publisher, StoppedError
from trainer.reporter import CostMeter, TrainingReporter
from trainer.rollout import DomainVersions, Promotion
from trainer.state import TrainingCost

CHECKPOINT_SECONDS = 30.0
"""Longest training that a crash loses, and longest wait of a trained record for its acknowledgement."""

_PATIENCE = 2.0  # seconds of waiting until the stream is read and versions in service are judged again
_EVALUATING = "evaluating a drafter on held-out records"


class Worker:
    """Trainer of one domain. It trains while it has the domain's lease, and waits while another trainer has it.

    A record is acknowledged once a checkpoint that includes its training is on disk. A trainer that takes over reads
    the checkpoint, and the stream delivers all other records again.

    Attributes:
        domain: the domain.
        lease: the right to change the domain's versions.
        learner: the learner; None until a version exists.
        intake: reads records from the stream into the learner.
        budget: decides when a micro-step runs.
        publisher: publishes candidates.
        reporter: keeps and reports the state.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        context: TargetContext,
        scheduler: DomainScheduler | None = None,
        has_other_trainer: HasOtherTrainer = lambda: None,
    ) -> None:
        """Create the trainer of ``settings.domain``; see ``Lease`` for ``has_other_trainer``.

        A single domain needs no scheduler.
        """
        self.domain, self._settings, self._context = settings.domain, settings, context
        scheduler = scheduler or DomainScheduler((self.domain,), context.executor.clock)
        self._loads, storage = ReplicaLoads(redis_url), storage_of(settings)
        self.lease = Lease(PointerFiles(storage), self.domain, has_other_trainer)
        events = tracking.TrackedEvents(redis_url, lambda: tracking.make(settings))
        self._versions = DomainVersions(self.domain, Registry(storage), Pointer(redis_url, storage), events, self.lease)
        cost = CostMeter(partial(scheduler.cpu_seconds, self.domain))
        reports, mixes = TrainingReports(redis_url), settings.drafter.mixes
        self.reporter = TrainingReporter(self._versions, cost, reports, mixes=mixes)
        self.budget = TrainingBudget.of(settings, self._loads, context.executor, scheduler, self.reporter)
        self.publisher = Publisher(
            Promotion(self._versions, settings.trainer, context.build, settings.registry.keep),
            settings.trainer,
            context.target.label,
            self.budget,
            self.reporter,
            Upstreams(self._loads, self.domain),
            MeasuredEffects(self._loads, self.domain),
            self._wait_to_evaluate,
        )
        self.intake = Intake(settings, redis_url, context, self.reporter, self.publisher.observe)
        self._checkpoints = Checkpoints(settings, context.target, self.reporter, self.lease)
        self.learner: Learner | None = None

    def run(self) -> None:
        """Train until ``stop``, then write a checkpoint. Only one thread may run this.

        Raises:
            FencedError: another trainer has taken over the domain; this trainer writes nothing after that.
        """
        lower_priority(self._settings.trainer.threads)
        try:
            with suppress(StoppedError):
                while not self.budget.ended.is_set():
                    if self.budget.paused:
                        self.budget.rest("paused")
                        self._maintain()
                    elif (learner := self.learner or self._open()) is None:
                        self.budget.ended.wait(0.5)
                    else:
                        self._iterate(learner)
            self.checkpoint()
        except FencedError as error:
            self._set_state("stopped", str(error))
            raise
        finally:
            self.budget.release()
            for part in (self.intake, self._loads, self.reporter, self._versions):
                part.close()
            self.lease.release()

    def stop(self) -> None:
        """End ``run`` after the current micro-step."""
        self.budget.end()

    def pause(self, timeout: float = 5.0) -> bool:
        """Stop training; return True once the loop rests, False when ``timeout`` seconds pass before that."""
        return self.budget.pause(timeout)

    def resume(self) -> None:
        """Continue training after ``pause``."""
        self.budget.resume()

    def status(self) -> dict[str, Any]:
        """Return the ``TrainerState`` as a dict, with the ``live`` acceptance by domain and version; thread-safe."""
        return {**self.reporter.status(self.learner), "live": self.publisher.live.rows()}

    def checkpoint(self) -> None:
        """Write a checkpoint, then acknowledge its records; in this order a crash loses no record.

        Raises:
            FencedError: another trainer has taken over the domain.
        """
        if self.learner is not None and self._checkpoints.save(self.learner):
            self.intake.acknowledge()

    def _open(self) -> Learner | None:
        """Load the checkpoint or the stable version; return None without a version or a lease."""
        try:
            version = self.publisher.acquire_version()
        except NotYetError as error:
            self._set_state("waiting", str(error))
            return None
        fresh = partial(self._context.learner, version, self._settings, self.intake.replay, self.intake.recalled)
        learner = fresh()
        resumed = self._checkpoints.resume(learner, version)
        if not resumed:
            learner = fresh()
            self.reporter.resume_cost(TrainingCost())
        self.publisher.start_training(version, resumed)
        self.learner = learner
        self.publisher.update_reports()
        self.budget.take_next_turn()
        return learner

    def _iterate(self, learner: Learner) -> None:
        """Read from the stream once, then run one micro-step when there is something to train on."""
        self._maintain()
        self.budget.read_loads()
        if self._ready(learner):
            self.intake.read(learner)
        else:
            self.budget.release()
            patience = self.budget.investor.stream_interval(awaited=self.publisher.canary is not None)
            self.intake.gather(learner, patience, partial(self.budget.sleep, idle=self._maintain))
        if self._ready(learner):
            self._train(learner)
        self.publisher.decide_canary()
        self.publisher.follow_effect()
        if self.publisher.due(learner):
            self._set_state("training", _EVALUATING)
            if self.publisher.propose(learner):
                self.checkpoint()
        self.publisher.update_reports()
        if self._checkpoints.save_if_due(learner, self.intake.finished, CHECKPOINT_SECONDS):
            self.intake.acknowledge()

    def _ready(self, learner: Learner) -> bool:
        """Return whether a micro-step is worthwhile; report the reason otherwise."""
        missing = self.intake.missing(learner)
        if not missing and not self.publisher.may_train(learner):
            missing = "more records are needed to evaluate the stable drafter on this revision of the target"
        missing = missing or self.budget.missing(learner)
        if missing:
            self._set_state("waiting", missing)
        return not missing

    def _train(self, learner: Learner) -> None:
        if not self.budget.wait(self._maintain, _PATIENCE):
            return
        self._set_state("training", "")
        trainer, executor = self._settings.trainer, self._context.executor
        with self.budget.step(self._renew):
            learned = learner.step(trainer.micro_batch_tokens, executor)
        learner.add_seconds(self.budget.worked * executor.size * trainer.threads)
        self.intake.finish(learned.fresh)
        self.reporter.record_step(learner, learned)

    def _wait_to_evaluate(self) -> bool:
        """Wait for spare capacity for a part of an evaluation, see ``TrainingBudget.wait``."""
        may_run = self.budget.wait(self._renew)
        if may_run:
            self._set_state("training", _EVALUATING)
        return may_run

    def _report(self) -> None:
        self.reporter.report(self.learner, self.budget.investor.decision, self.budget.investor.worth)

    def _renew(self) -> bool:
        """Report the state and renew the lease; return whether a yielding micro-step must end.

        It must end when requests must be forgotten, or a canary has to be decided on.
        """
        self._report()
        self.lease.alive()
        canary = self.publisher.canary
        return self.intake.must_forget() or (canary is not None and canary.is_late(time.monotonic()))

    def _maintain(self) -> None:
        """Report the state, renew the lease and forget purged requests."""
        self._report()
        self.lease.alive()
        self.intake.forget_purged()

    def _set_state(self, state: str, detail: str) -> None:
        self.reporter.state.set(state, detail)
