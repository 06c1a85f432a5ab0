"""The trainer's loop: stream -> replay -> micro-steps -> gate -> a version in service. No Ray here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from redis.exceptions import RedisError

from osd.capture.purge import Purges
from osd.capture.trace import Trace
from osd.config import Settings
from osd.drafters.acceptance_head import suited
from osd.drafters.trainable import Trainable
from osd.learning.distiller import Distiller
from osd.learning.drift import DriftWatch
from osd.learning.gate import Gate
from osd.registry.ledger import Ledger, Spent
from osd.registry.pointer import Pointer
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.versions import Registry, Version
from trainer import tracking
from trainer.candidates import Candidates, StoppedError
from trainer.capacity import Capacity, lower_priority
from trainer.forgetting import Forgetting
from trainer.intake import Intake
from trainer.learnt import Learnt
from trainer.pace import Pace
from trainer.progress import Progress
from trainer.rollout import Build, Publisher
from trainer.spending import Spending
from trainer.status import Status
from trainer.team import Alone, Team
from trainer.tracking.events import TrackedEvents
from trainer.turns import DRIFT_WEIGHT, Turns

logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 30.0
"""Training that a crash may lose, and how long a record that was trained on waits for its acknowledgement."""

_IDLE_MS = 200
_TELL_SECONDS = 1.0


@dataclass(frozen=True)
class Workshop:
    """What a trainer needs for a target: its vocabulary and hidden size, how a drafter is made, and who trains it."""

    vocabulary: int
    hidden_size: int
    build: Build
    team: Team = field(default_factory=Alone)


class Worker:
    """Trains the drafter of one domain.

    Records are acknowledged when a checkpoint that was written after they were trained on is on disk. Whoever takes
    over reads the checkpoint and is given all others again.
    """

    def __init__(self, settings: Settings, redis_url: str, workshop: Workshop, turns: Turns | None = None) -> None:
        """Train ``settings.domain``; with ``turns`` beside the workers of other domains."""
        self._settings = settings
        self._domain = settings.domain
        self._turns = turns or Turns((self._domain,), workshop.team.clock)
        self._workshop = workshop
        self._status = Status()
        self._intake = Intake(settings, redis_url, workshop.vocabulary, self._status, self._observe)
        self._ledger = Ledger(redis_url)
        self._spending = Spending(self._domain, self._ledger, partial(self._turns.clock, self._domain))
        self._learnt = Learnt()
        self._forgetting = Forgetting(self._domain, Purges(redis_url), self._intake, self._learnt)
        self._progress = Progress(settings, self._status, self._intake.replay, self._spending, self._learnt, self._make)
        self._pointer, self._board = Pointer(redis_url), ReplicaLoads(redis_url)
        self._events = TrackedEvents(redis_url, lambda: tracking.make(settings))
        trainer = settings.trainer
        cores = workshop.team.size * trainer.threads
        self._capacity = Capacity(self._board, trainer, lambda: workshop.team.clock() / cores)
        gate = Gate(settings.growth.lookahead, trainer.divergence)
        registry = Registry(settings.registry_dir)
        self._publisher = Publisher(self._domain, trainer, registry, self._pointer, self._events, gate, workshop.build)
        self._drift = DriftWatch(trainer.drift_fall, trainer.drift_records)
        self._pace = Pace(trainer)
        self._candidates = Candidates(
            trainer, self._publisher, self._intake.replay, self._progress, self._pace, self._status, self._spending,
            self._learnt, partial(self._spare, self._forgetting.alive), self._capacity.working,
        )  # fmt: skip
        self._distiller: Distiller | None = None
        self._width = 0
        self._told_at = 0.0
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._resting = threading.Event()

    def run(self) -> None:
        """Work until ``stop``; ends with a checkpoint. At most one thread may run this."""
        lower_priority(self._settings.trainer.threads)
        try:
            while not self._stop.is_set():
                if self._paused.is_set():
                    self._rest("paused")
                    self._forgetting.look()
                    continue
                if self._distiller is None and not self._open():
                    self._stop.wait(0.5)
                    continue
                try:
                    self._turn()
                except StoppedError:
                    break
            if self._distiller is not None:
                self._checkpoint(self._distiller)
        finally:
            self._turns.give(self._domain)
            for connection in (self._intake, self._pointer, self._events, self._board, self._ledger, self._forgetting):
                connection.close()

    def stop(self) -> None:
        """End ``run`` after the micro-step that is under way."""
        self._stop.set()

    def pause(self, timeout: float = 5.0) -> bool:
        """Train no more; True as soon as the loop is at rest, False when it is not within ``timeout`` seconds."""
        self._resting.clear()
        self._paused.set()
        return self._resting.wait(timeout)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._paused.clear()

    def status(self) -> dict[str, Any]:
        """A ``Status`` as a dict, from any thread."""
        return asdict(self._status)

    def _open(self) -> bool:
        """Take up the checkpoint, else the version in service; False while there is no version."""
        try:
            version = self._publisher.in_service()
        except RedisError as error:
            self._say("waiting", f"Redis cannot be reached: {error}")
            return False
        if version is None:
            self._say("waiting", f"the registry has no drafter version of {self._domain} in service yet")
            return False
        self._distiller = self._progress.resume(version, self._fresh(version))
        if self._distiller is None:
            self._distiller = self._make(self._fresh(version))
            self._spending.resume(Spent())
        else:
            self._pace.resumed()
        self._width = len(self._distiller.drafter.taps) * self._workshop.hidden_size
        self._note()
        return True

    def _make(self, drafter: Trainable) -> Distiller:
        return self._workshop.team.distiller(self._domain, drafter, self._settings.trainer)

    def _fresh(self, version: Version) -> Trainable:
        drafter = suited(self._workshop.build(version.config), self._settings.growth)
        drafter.load_weights(version.weights)
        return drafter

    def _turn(self) -> None:
        """One look at the stream and, if there is something to train on, one micro-step."""
        distiller = self._distiller
        if distiller is None:
            return
        self._spending.tell()
        self._forgetting.look()
        ready = self._ready()
        if not ready:
            self._turns.give(self._domain)
        self._pace.arrived(self._intake.read(self._width, 1 if ready else _IDLE_MS))
        if self._ready():
            self._train(distiller)
        self._candidates.decide()
        if self._candidates.due(distiller):
            self._say("training", "evaluating a candidate")
            self._adapt(distiller)
            if self._candidates.propose(distiller):
                self._turns.weigh(self._domain, 1.0)
                self._checkpoint(distiller)
        self._note()
        if self._progress.age(distiller, self._intake.finished) > CHECKPOINT_SECONDS:
            self._checkpoint(distiller)

    def _ready(self) -> bool:
        """Whether there is something worth a micro-step; otherwise says what is missing."""
        wanted = self._settings.trainer.min_records
        replay = self._intake.replay
        if self._status.records < wanted or not replay.train_records:
            refused = f", {self._status.refused} were refused" if self._status.refused else ""
            self._say("waiting", f"{self._status.records} of {wanted} records to begin with{refused}")
            return False
        if not self._pace.due(replay.fresh_records, time.monotonic()):
            self._say("waiting", "every record was trained on often enough, waiting for new ones")
            return False
        return True

    def _train(self, distiller: Distiller) -> None:
        if not self._spare(self._forgetting.look):
            return
        self._say("training", "")
        if not distiller.steps:
            self._adapt(distiller)
        team = self._workshop.team
        samples = [self._intake.replay.sample(self._capacity.tokens) for _ in range(team.size)]
        with self._capacity.working():
            step = team.step(distiller, samples)
        self._capacity.fit()
        fresh = [key for sample in samples for key in sample.fresh]
        positions = sum(sample.positions for sample in samples)
        self._intake.finish(fresh)
        self._learnt.add(request_id for request_id, _ in fresh)
        self._status.trained += len(fresh)
        self._status.tokens += positions
        self._pace.worked(positions)
        if not step.skipped:
            self._status.loss = step.loss
        self._note()
        now = time.monotonic()
        if now - self._told_at > _TELL_SECONDS:
            self._told_at = now
            self._status.lag = self._intake.lag()
            self._publisher.tell(
                "train_step", None, loss=self._status.loss, step=distiller.steps, tokens=self._status.tokens,
                records=self._status.records, lag=self._status.lag, skipped=distiller.skipped,
                **({} if distiller.head_loss is None else {"head_loss": distiller.head_loss}),
                cpu_seconds=round(self._spending.spent().total, 3), **self._pace.figures(),
            )  # fmt: skip

    def _adapt(self, distiller: Distiller) -> None:
        """Draft what traffic uses by now: the first records show few of its tokens."""
        distiller.adapt_vocabulary(torch.from_numpy(self._intake.replay.token_counts(self._workshop.vocabulary)))

    def _observe(self, trace: Trace) -> None:
        """Look at what a live request says of the drafter that served it."""
        if trace.drafter_domain == self._domain:
            self._publisher.observe(trace)
        drift = self._drift.add(trace)
        if drift is None:
            return
        logger.warning("acceptance of %s fell from %.3f to about %.3f", drift.domain, drift.before, drift.now)
        self._status.drifts += 1
        self._status.drift = asdict(drift)
        self._pace.drifted()
        self._turns.weigh(self._domain, DRIFT_WEIGHT)
        figures = {"before": round(drift.before, 4), "now": round(drift.now, 4), "source": drift.domain}
        self._publisher.tell("drift", drift.version, **figures)

    def _spare(self, idle: Callable[[], None]) -> bool:
        """Wait for the turn, and until serving leaves room for a micro-step; False when the loop shall end.

        ``idle`` is called now and then while that takes.
        """
        self._spending.tell()
        idle()

        def rest(why: str) -> None:
            self._rest(why)
            idle()

        while self._turns.take(self._domain, self._stop):
            if not self._capacity.wait(self._stop, self._paused, rest):
                return False
            if self._turns.has(self._domain):
                return True
        return False

    def _checkpoint(self, distiller: Distiller) -> None:
        """Save, then acknowledge: in this order nothing is lost in between."""
        if self._progress.save(distiller):
            self._intake.acknowledge()

    def _note(self) -> None:
        if self._distiller is not None:
            self._status.steps, self._status.skipped = self._distiller.steps, self._distiller.skipped
        self._status.version = self._publisher.stable

    def _rest(self, why: str) -> None:
        self._turns.give(self._domain)
        self._say(why, "")
        if why == "paused":
            self._resting.set()
            self._stop.wait(0.02)

    def _say(self, state: str, detail: str) -> None:
        self._status.state, self._status.detail = state, detail
