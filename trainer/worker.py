"""The trainer's loop around the learner: stream -> micro-steps -> gate -> a version in service. No Ray here."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from osd.config import Settings
from osd.learning.online import Learner
from osd.registry.lease import Elsewhere, Lease
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
from trainer.rollout import Promotion, Service
from trainer.state import Spent

CHECKPOINT_SECONDS = 30.0
"""Training that a crash may lose, and how long a record that was trained on waits for its acknowledgement."""

_PATIENCE = 0.5  # seconds without the turn, after which the stream is read again


class Worker:
    """Trains the drafter of one domain while it has the domain's lease, and waits while another trainer has it.

    ``intake`` brings records to the ``learner``, which is None until there is a version; ``budget`` says when a
    micro-step runs, ``publisher`` takes candidates into service, ``reporter`` keeps the state. Records are acknowledged
    when a checkpoint that was written after they were trained on is on disk. Whoever takes over reads the checkpoint
    and is given all others again.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        context: TargetContext,
        scheduler: DomainScheduler | None = None,
        elsewhere: Elsewhere = lambda: None,
    ) -> None:
        """Train ``settings.domain``, with ``scheduler`` beside other domains; for ``elsewhere`` see ``Lease``."""
        self.domain, self._settings, self._context = settings.domain, settings, context
        scheduler = scheduler or DomainScheduler((self.domain,), context.executor.clock)
        self._loads, storage = ReplicaLoads(redis_url), storage_of(settings)
        self.lease = Lease(PointerFiles(storage), self.domain, elsewhere)
        events = tracking.TrackedEvents(redis_url, lambda: tracking.make(settings))
        self._service = Service(self.domain, Registry(storage), Pointer(redis_url, storage), events, self.lease)
        cost = CostMeter(partial(scheduler.clock, self.domain))
        self.reporter = TrainingReporter(self._service, cost, TrainingReports(redis_url))
        self.budget = TrainingBudget.of(settings, self._loads, context.executor, scheduler, self.reporter)
        self.publisher = Publisher(
            Promotion(self._service, settings.trainer, context.build, settings.registry.keep),
            settings.trainer,
            context.target.label,
            self.budget,
            self.reporter,
            Upstreams(self._loads, self.domain),
            MeasuredEffects(self._loads, self.domain),
            partial(self._spare, self._alive),
        )
        self.intake = Intake(settings, redis_url, context, self.reporter, self.publisher.observe)
        self._checkpoints = Checkpoints(settings, context.target, self.reporter, self.lease)
        self.learner: Learner | None = None

    def run(self) -> None:
        """Work until ``stop``; ends with a checkpoint. At most one thread may run this.

        Raises:
            FencedError: another trainer has taken over the domain; nothing is written any more.
        """
        lower_priority(self._settings.trainer.threads)
        try:
            with suppress(StoppedError):
                while not self.budget.over.is_set():
                    if self.budget.paused:
                        self.budget.rest("paused")
                        self._look()
                    elif (learner := self.learner or self._open()) is None:
                        self.budget.over.wait(0.5)
                    else:
                        self._turn(learner)
            self.checkpoint()
        except FencedError as error:
            self._say("stopped", str(error))
            raise
        finally:
            self.budget.give()
            for part in (self.intake, self._loads, self.reporter, self._service):
                part.close()
            self.lease.release()

    def stop(self) -> None:
        """End ``run`` after the micro-step that is under way."""
        self.budget.end()

    def pause(self, timeout: float = 5.0) -> bool:
        """Train no more; True as soon as the loop is at rest, False when it is not within ``timeout`` seconds."""
        return self.budget.pause(timeout)

    def resume(self) -> None:
        """Undo ``pause``."""
        self.budget.resume()

    def status(self) -> dict[str, Any]:
        """Return the ``TrainerState`` as a dict; from any thread."""
        return self.reporter.status(self.learner)

    def checkpoint(self) -> None:
        """Save, then acknowledge: in this order nothing is lost in between.

        Raises:
            FencedError: another trainer has taken over the domain.
        """
        if self.learner is not None and self._checkpoints.save(self.learner):
            self.intake.acknowledge()

    def _open(self) -> Learner | None:
        """Take up the checkpoint, else the version in service; None while there is none, or another trainer."""
        try:
            version = self.publisher.take_up()
        except NotYetError as error:
            self._say("waiting", str(error))
            return None
        fresh = partial(self._context.learner, version, self._settings, self.intake.replay, self.intake.recalled)
        learner = fresh()
        resumed = self._checkpoints.resume(learner, version)
        if not resumed:
            learner = fresh()
            self.reporter.begin(Spent())
        self.publisher.begun(version, resumed)
        self.learner = learner
        self.publisher.follow()
        self.budget.first()
        return learner

    def _turn(self, learner: Learner) -> None:
        """Look at the stream once and, if there is something to train on, do one micro-step."""
        self._report()
        self._look()
        self.budget.look()
        if self._ready(learner):
            self.intake.read(learner)
        else:
            self.budget.give()
            patience = self.budget.investor.patience(awaited=self.publisher.canary is not None)
            self.intake.gather(learner, patience, partial(self.budget.sleep, idle=self._look))
        if self._ready(learner):
            self._train(learner)
        self.publisher.decide()
        if self.publisher.due(learner):
            self._say("training", "evaluating a candidate")
            if self.publisher.propose(learner):
                self.checkpoint()
        self.publisher.follow()
        if self._checkpoints.keep(learner, self.intake.finished, CHECKPOINT_SECONDS):
            self.intake.acknowledge()

    def _ready(self, learner: Learner) -> bool:
        """Whether there is something worth a micro-step; otherwise says what is missing."""
        missing = self.intake.missing(learner)
        if not missing and not self.publisher.judged(learner):
            missing = "more records are needed to judge the drafter in service on this revision of the target"
        missing = missing or self.budget.missing(learner)
        if missing:
            self._say("waiting", missing)
        return not missing

    def _train(self, learner: Learner) -> None:
        if not self._spare(self._look, _PATIENCE):
            return
        self._say("training", "")
        trainer, executor = self._settings.trainer, self._context.executor
        with self.budget.step(self._alive):
            learned = learner.step(trainer.micro_batch_tokens, executor)
        learner.worked(self.budget.worked * executor.size * trainer.threads)
        self.intake.finish(learned.fresh)
        self.reporter.learned(learner, learned)

    def _spare(self, idle: Callable[[], object], patience: float = math.inf) -> bool:
        """Wait for spare time, see ``TrainingBudget.wait``."""
        self._report()
        return self.budget.wait(idle, patience)

    def _report(self) -> None:
        self.reporter.report(self.learner, self.budget.investor.decided, self.budget.investor.worth)

    def _alive(self) -> bool:
        """Report that this trainer goes on; whether it is to forget something."""
        self.lease.alive()
        return self.intake.wanted()

    def _look(self) -> None:
        """Report that this trainer goes on, and forget what is asked for."""
        self.lease.alive()
        self.intake.look()

    def _say(self, state: str, detail: str) -> None:
        self.reporter.state.say(state, detail)
