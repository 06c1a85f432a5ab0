"""The trainer's loop around the learner: stream -> micro-steps -> gate -> a version in service. No Ray here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from osd.capture.purge import Purges
from osd.config import Settings
from osd.learning.drift import Drift
from osd.learning.online import Learner, empty_replay
from osd.learning.recalled import Recalled
from osd.learning.value import Investment
from osd.registry.learnt import Learnt
from osd.registry.lease import Elsewhere, Lease
from osd.registry.ledger import Ledger, Spent
from osd.registry.place import storage_of
from osd.registry.pointer import FencedError, Pointer
from osd.registry.pointer_file import PointerFiles
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.registry.training import TrainingReports
from osd.registry.versions import Registry
from osd.runtime.device import cores
from trainer import tracking
from trainer.accounts import Accounts, CostMeter
from trainer.beginning import NotYet, lacking, learner_of, take_up
from trainer.candidates import Candidates, LiveRequests, StoppedError
from trainer.capacity import Capacity, lower_priority
from trainer.checkpoint import Checkpoints
from trainer.domain_scheduler import DomainScheduler
from trainer.executor import TargetContext
from trainer.intake import Forgetting, Intake
from trainer.investor import Investor, Slowing
from trainer.revision import Revision
from trainer.rollout import Publisher, Service
from trainer.spare_time import SpareTime
from trainer.status import Status
from trainer.telling import Telling
from trainer.upstreams import Upstreams

logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 30.0
"""Training that a crash may lose, and how long a record that was trained on waits for its acknowledgement."""

_PATIENCE = 0.5  # seconds without the turn, after which the stream is read again
_TELL_SECONDS = 1.0


class Worker:
    """Trains the drafter of one domain while it has the domain's lease, and waits while another trainer has it.

    Records are acknowledged when a checkpoint that was written after they were trained on is on disk. Whoever takes
    over reads the checkpoint and is given all others again.

    ``lease`` is its hold on the domain, ``intake`` follows the stream, ``replay`` has the records in memory,
    ``recalled`` what recall knows of them where it drafts too, ``learner`` is None until there is a version.
    """

    def __init__(
        self, settings: Settings, redis_url: str, context: TargetContext, scheduler: DomainScheduler | None = None,
        elsewhere: Elsewhere = lambda: None,
    ) -> None:  # fmt: skip
        """Train ``settings.domain``, with ``scheduler`` beside other domains; for ``elsewhere`` see ``Lease``."""
        trainer, executor = settings.trainer, context.executor
        self._settings, self._context, self._domain = settings, context, settings.domain
        self._scheduler = scheduler or DomainScheduler((self._domain,), executor.clock)
        self._loads = ReplicaLoads(redis_url)
        self._slowing = Slowing()
        self._capacity = Capacity(
            self._loads, trainer, lambda: executor.clock() / (executor.size * trainer.threads), self._slowed
        )
        self._spare_time = SpareTime(self._domain, self._scheduler, self._capacity, self._say)
        events, storage = tracking.TrackedEvents(redis_url, lambda: tracking.make(settings)), storage_of(settings)
        self.lease = Lease(PointerFiles(storage), self._domain, elsewhere)
        self._service = Service(self._domain, Registry(storage), Pointer(redis_url, storage), events, self.lease)
        self._publisher = Publisher(self._service, trainer, context.build, settings.registry.keep)
        self._ledger = Ledger(redis_url)
        cost = CostMeter(self._domain, self._ledger, partial(self._scheduler.clock, self._domain), self.lease.held)
        self._accounts = Accounts(Status(), cost, Learnt())
        self._checkpoints = Checkpoints(settings, context.target, self._accounts, self.lease)
        self.replay = empty_replay(trainer)
        self.recalled = Recalled(settings.recall) if settings.drafter.mixes else None
        live = LiveRequests(trainer, self._publisher, self._accounts.status, self._drifted)
        status = self._accounts.status
        self.intake = Intake(settings, redis_url, context, status, self.replay, self.recalled, live.observe)
        self._forgetting = Forgetting(self._domain, Purges(redis_url), self.intake, self._accounts.learnt)
        spare = partial(self._spare, self._alive)
        self._investor = Investor(settings, self._loads, self._capacity, self._slowing, _event_of(self._service))
        self._telling = Telling(self._domain, TrainingReports(redis_url), self._accounts, self.replay, self.lease.held)
        self._candidates = Candidates(
            self._publisher, self._accounts, spare, self._capacity.working, self._investor.worth, context.target.label,
            trainer.drift_fall, Upstreams(self._loads, self._domain),
        )  # fmt: skip
        self.learner: Learner | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Work until ``stop``; ends with a checkpoint. At most one thread may run this.

        Raises:
            FencedError: another trainer has taken over the domain; nothing is written any more.
        """
        lower_priority(self._settings.trainer.threads)
        try:
            with suppress(StoppedError):
                while not self._spare_time.over.is_set():
                    if self._spare_time.paused:
                        self._spare_time.rest("paused")
                        self._look()
                    elif (learner := self.learner or self._open()) is None:
                        self._spare_time.over.wait(0.5)
                    else:
                        self._turn(learner)
            self.checkpoint()
        except FencedError as error:
            self._say("stopped", str(error))
            raise
        finally:
            self._scheduler.give(self._domain)
            service, others = self._service, (self.intake, self._loads, self._ledger, self._telling, self._forgetting)
            for connection in (*others, service.pointer, service.events):
                connection.close()
            self.lease.release()

    def stop(self) -> None:
        """End ``run`` after the micro-step that is under way."""
        self._spare_time.end()

    def pause(self, timeout: float = 5.0) -> bool:
        """Train no more; True as soon as the loop is at rest, False when it is not within ``timeout`` seconds."""
        return self._spare_time.pause(timeout)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._spare_time.resume()

    def status(self) -> dict[str, Any]:
        """A ``Status`` as a dict, from any thread."""
        return asdict(self._accounts.status_of(self.learner))

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
            version = take_up(self._domain, self._service, self._publisher, self.lease)
        except NotYet as error:
            self._say("waiting", str(error))
            return None
        fresh = partial(learner_of, version, self._settings, self._context, self.replay, self.recalled)
        learner = fresh()
        if not self._checkpoints.resume(learner, version):
            learner = fresh()
            self._accounts.cost.resume(Spent())
            self._candidates.revision = Revision.of(version, self._context.target.label)
        self._accounts.cost.keep(self._publisher.retire())
        self._accounts.status.version, self.learner = self._publisher.stable, learner
        self._scheduler.value(self._domain, math.inf)  # it is judged before anybody knows
        return learner

    def _drifted(self, drift: Drift) -> None:
        """Learn what is new at once."""
        if self.learner is not None:
            self.learner.drifted(drift)

    def _slowed(self, loads: Mapping[str, ReplicaLoad]) -> None:
        """Charge what the rounds beside this domain's training lost since the last look."""
        lost = self._slowing.observe(loads.values(), self._scheduler.clock(self._domain), time.monotonic())
        self._accounts.cost.charge(lost * cores(self._settings.engine.threads))

    def _turn(self, learner: Learner) -> None:
        """One look at the stream and, if there is something to train on, one micro-step."""
        self._tell()
        self._look()
        self._capacity.spare(glance=not self._investor.waits)  # whether requests run says what training costs
        if self._ready(learner):
            self.intake.read(learner)
        else:
            self._scheduler.give(self._domain)
            patience = self._investor.patience(awaited=self._publisher.canary is not None)
            self.intake.gather(learner, patience, partial(self._spare_time.sleep, idle=self._look))
        if self._ready(learner):
            self._train(learner)
        self._candidates.decide()
        if self._candidates.due(learner):
            self._say("training", "evaluating a candidate")
            if self._candidates.propose(learner):
                self.checkpoint()
        self._accounts.status.version = self._publisher.stable
        if self._checkpoints.keep(learner, self.intake.finished, CHECKPOINT_SECONDS):
            self.intake.acknowledge()

    def _ready(self, learner: Learner) -> bool:
        """Whether there is something worth a micro-step; otherwise says what is missing."""
        least, refused = self._settings.trainer.min_records, self._accounts.status.refused
        missing = lacking(learner, least, refused, self.replay.fresh_records)
        if not missing and not self._candidates.judged(learner):
            missing = "more records are needed to judge the drafter in service on this revision of the target"
        if not missing and (investment := self._investor.next_slice(learner)) is not None:
            self._scheduler.value(self._domain, investment.worth)
            missing = investment.missing
        if missing:
            self._say("waiting", missing)
        return not missing

    def _train(self, learner: Learner) -> None:
        if not self._spare(self._look, _PATIENCE):
            return
        self._say("training", "")
        with self._spare_time.step(self._alive):
            learned = learner.step(self._settings.trainer.micro_batch_tokens, self._context.executor)
        learner.worked(self._capacity.worked * self._context.executor.size * self._settings.trainer.threads)
        self.intake.finish(learned.fresh)
        self._accounts.learned(learned)
        now = time.monotonic()
        if now - self._told_at > _TELL_SECONDS:
            self._told_at = now
            self._service.tell("train_step", None, **self._accounts.figures(learner))

    def _spare(self, idle: Callable[[], object], patience: float = math.inf) -> bool:
        """Wait for spare time, see ``SpareTime.wait``."""
        self._tell()
        return self._spare_time.wait(idle, patience)

    def _tell(self) -> None:
        self._telling.tell(self.learner, self._investor.decided)

    def _alive(self) -> bool:
        """Say that this trainer goes on; whether it is to forget something."""
        self.lease.alive()
        return self._forgetting.wanted()

    def _look(self) -> None:
        """Say that this trainer goes on, and forget what is asked for."""
        self.lease.alive()
        self._forgetting.look()

    def _say(self, state: str, detail: str) -> None:
        status = self._accounts.status
        status.state, status.detail = state, detail


def _event_of(service: Service) -> Callable[[Investment], None]:
    """Tells a decision as an event."""
    return lambda investment: service.tell("investment", None, **investment.figures())
