"""The trainer's loop: stream -> replay -> micro-steps -> gate -> a version in service. No Ray here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from redis.exceptions import RedisError

from osd.config import Settings
from osd.drafters.base import Drafter
from osd.learning.batch import DistillBatch, collate, pack
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.registry.events import Events
from osd.registry.load_board import LoadBoard
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry, Version
from trainer import checkpoint
from trainer.capacity import Capacity, lower_priority
from trainer.intake import Intake
from trainer.rollout import Build, Publisher
from trainer.status import Status

logger = logging.getLogger(__name__)

PASSES = 8
"""How often the completion of a record is trained on before the trainer waits for new ones: more would overfit."""

CHECKPOINT_SECONDS = 30.0
"""Training that a crash may lose, and how long a record that was trained on waits for its acknowledgement."""

HELD_OUT_TOKENS = 4096
"""Newest held-out tokens that the gate looks at: some twenty requests, judged in a few seconds."""

EVALUATION_TOKENS = 128
"""Micro-batch of the evaluation: short enough to yield, and always the same, so that both sides see the same."""

_IDLE_MS = 200
_TELL_SECONDS = 1.0


@dataclass(frozen=True)
class Workshop:
    """What the trainer knows of the target: its vocabulary, its hidden size, and how a drafter for it is made."""

    vocabulary: int
    hidden_size: int
    build: Build


_SAVED = ("records", "trained", "held_out", "refused", "tokens", "published", "rejected")


class _StoppedError(Exception):
    """The loop was asked to end in the middle of an evaluation."""


class Worker:
    """Trains the drafter of one domain.

    Records are acknowledged when a checkpoint that was written after they were trained on is on disk. Whoever takes
    over reads the checkpoint and is given all others again. The replay buffer itself is not kept: it fills again from
    the traffic.
    """

    def __init__(self, settings: Settings, redis_url: str, workshop: Workshop) -> None:
        self._settings = settings
        self._domain = settings.domain
        self._workshop = workshop
        self._path = settings.home_dir / "trainer" / f"{self._domain}.safetensors"
        self._status = Status()
        self._intake = Intake(settings, redis_url, workshop.vocabulary, self._status)
        self._pointer, self._events, self._board = Pointer(redis_url), Events(redis_url), LoadBoard(redis_url)
        trainer = settings.trainer
        self._capacity = Capacity(self._board, trainer)
        gate = Gate(settings.growth.depth, trainer.divergence)
        registry = Registry(settings.registry_dir)
        self._publisher = Publisher(self._domain, registry, self._pointer, self._events, gate, workshop.build)
        self._distiller: Distiller | None = None
        self._width = 0
        self._budget = 0
        self._next_gate = trainer.steps_per_candidate
        self._gate_after = 0.0
        self._saved_at = time.monotonic()
        self._saved_steps = 0
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
                    continue
                if self._distiller is None and not self._open():
                    self._stop.wait(0.5)
                    continue
                try:
                    self._turn()
                except _StoppedError:
                    break
            if self._distiller is not None:
                self._checkpoint()
        finally:
            for connection in (self._intake, self._pointer, self._events, self._board):
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
        self._distiller = self._resume(version) or Distiller(self._fresh(version), self._settings.trainer)
        self._width = len(self._distiller.drafter.taps) * self._workshop.hidden_size
        self._note()
        return True

    def _fresh(self, version: Version) -> Drafter:
        drafter = self._workshop.build(version.config)
        drafter.load_weights(version.weights)
        return drafter

    def _resume(self, version: Version) -> Distiller | None:
        try:
            found = checkpoint.load(self._path)
            if found is None:
                return None
            tensors, state = found
            if (state.get("config"), state.get("target")) != (version.config, self._settings.target.source):
                raise checkpoint.CheckpointError(f"{self._path.name} is of another drafter or target")
            distiller = Distiller(self._fresh(version), self._settings.trainer)
            distiller.load_state_dict(tensors, state["distiller"])
            counters = {name: int(state["counters"][name]) for name in _SAVED}
            next_gate = int(state["next_gate"])
            self._intake.replay.set_random_state(state["random"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("training starts from version %d, not from the checkpoint: %s", version.number, error)
            return None
        for name, value in counters.items():
            setattr(self._status, name, value)
        # A smaller steps_per_candidate than last time counts at once.
        self._next_gate = min(next_gate, distiller.steps + self._settings.trainer.steps_per_candidate)
        self._saved_steps = distiller.steps
        logger.info("training goes on from the checkpoint at step %d", distiller.steps)
        return distiller

    def _turn(self) -> None:
        """One look at the stream and, if there is something to train on, one micro-step."""
        ready = self._ready()
        self._budget += PASSES * self._intake.read(self._width, 1 if ready else _IDLE_MS)
        if self._ready():
            self._train()
        self._consider()
        unsaved = self._intake.finished or (self._distiller and self._distiller.steps != self._saved_steps)
        if unsaved and time.monotonic() - self._saved_at > CHECKPOINT_SECONDS:
            self._checkpoint()

    def _ready(self) -> bool:
        """Whether there is something worth a micro-step; otherwise says what is missing."""
        wanted = self._settings.trainer.min_records
        if self._status.records < wanted or not self._intake.replay.train_records:
            refused = f", {self._status.refused} were refused" if self._status.refused else ""
            self._say("waiting", f"{self._status.records} of {wanted} records to begin with{refused}")
            return False
        if self._budget <= 0 and not self._intake.replay.fresh_records:
            self._say("waiting", "every record was trained on often enough, waiting for new ones")
            return False
        return True

    def _train(self) -> None:
        distiller = self._distiller
        if distiller is None or not self._capacity.wait(self._stop, self._paused, self._rest):
            return
        self._say("training", "")
        if not distiller.steps:
            distiller.adapt_vocabulary(torch.from_numpy(self._intake.replay.token_counts(self._workshop.vocabulary)))
        sample = self._intake.replay.sample(self._capacity.tokens)
        began = time.monotonic()
        batch = collate(sample.traces)
        step = distiller.step(batch)
        self._capacity.worked(time.monotonic() - began)
        self._intake.finish(sample.fresh)
        self._status.trained += len(sample.fresh)
        self._status.tokens += batch.positions
        self._budget = max(self._budget - batch.positions, 0)
        if not step.skipped:
            self._status.loss = step.loss
        self._note()
        if began - self._told_at > _TELL_SECONDS:
            self._told_at = began
            self._status.lag = self._intake.lag()
            self._publisher.tell(
                "train_step", None, loss=self._status.loss, step=distiller.steps, tokens=self._status.tokens,
                records=self._status.records, lag=self._status.lag,
            )  # fmt: skip

    def _consider(self) -> None:
        """Propose the drafter to the gate when it is time; a rejected one is trained on from where it is."""
        distiller, status = self._distiller, self._status
        if distiller is None or distiller.steps < self._next_gate or time.monotonic() < self._gate_after:
            return
        self._say("training", "evaluating a candidate")
        distiller.update()
        trained_on = {"records": status.trained, "tokens": status.tokens, "steps": distiller.steps}
        try:
            outcome = self._publisher.propose(distiller.drafter, self._held_out, trained_on)
        except RedisError as error:
            logger.warning("no candidate is published while Redis is gone: %s", error)
            self._gate_after = time.monotonic() + 2.0
            return
        except (ValueError, OSError) as error:
            logger.error("a candidate could not be published: %s", error)
            self._gate_after = time.monotonic() + 10.0
            return
        verdict = outcome.verdict
        logger.info("candidate at step %d: %s", distiller.steps, verdict.reason)
        status.gate = {"passed": verdict.passed, "reason": verdict.reason, **verdict.figures()}
        steps = self._settings.trainer.steps_per_candidate
        self._next_gate = distiller.steps + (max(steps // 5, 1) if verdict.waits else steps)
        if outcome.version is not None:
            status.published += 1
        elif not verdict.waits:
            status.rejected += 1
        self._note()
        self._checkpoint()

    def _held_out(self) -> Iterator[DistillBatch]:
        """The held-out positions in micro-batches, each as soon as serving can spare it."""
        for group in pack(self._intake.replay.held_out(HELD_OUT_TOKENS), EVALUATION_TOKENS):
            if not self._capacity.wait(self._stop, self._paused, self._rest):
                raise _StoppedError
            yield collate(group)

    def _checkpoint(self) -> None:
        """Save, then acknowledge: in this order nothing is lost in between."""
        distiller = self._distiller
        if distiller is None:
            return
        self._saved_at = time.monotonic()
        tensors, counters = distiller.state_dict()
        state = {
            "config": distiller.drafter.config(),
            "target": self._settings.target.source,
            "distiller": counters,
            "counters": {name: getattr(self._status, name) for name in _SAVED},
            "next_gate": self._next_gate,
            "random": self._intake.replay.random_state(),
        }
        try:
            checkpoint.save(self._path, tensors, state)
        except OSError as error:
            logger.error("the checkpoint cannot be written: %s", error)
            return
        self._saved_steps = distiller.steps
        self._intake.acknowledge()

    def _note(self) -> None:
        if self._distiller is not None:
            self._status.steps, self._status.skipped = self._distiller.steps, self._distiller.skipped
        self._status.version = self._publisher.stable

    def _rest(self, why: str) -> None:
        self._say(why, "")
        if why == "paused":
            self._resting.set()
            self._stop.wait(0.02)

    def _say(self, state: str, detail: str) -> None:
        self._status.state, self._status.detail = state, detail
