"""When the drafter in training is proposed, and when its canary is decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from redis.exceptions import RedisError

from osd.config import TrainerSettings
from osd.learning.batch import DistillBatch, collate, pack
from osd.learning.distiller import Distiller
from osd.learning.replay import Replay
from trainer.learnt import Learnt
from trainer.pace import Pace
from trainer.progress import Progress
from trainer.rollout import Publisher
from trainer.spending import Spending
from trainer.status import Status

logger = logging.getLogger(__name__)

HELD_OUT_TOKENS = 4096
"""Newest held-out tokens that the gate looks at: some twenty requests, judged in a few seconds."""

EVALUATION_TOKENS = 128
"""Micro-batch of the evaluation: short enough to yield, and always the same, so that both sides see the same."""

_CANARY_SECONDS = 0.5


class StoppedError(Exception):
    """The loop was asked to end in the middle of an evaluation."""


class Candidates:
    """Proposes the drafter to the gate every ``trainer.steps_per_candidate`` micro-steps, and follows the canary.

    Args:
        settings: of the trainer.
        publisher: takes a candidate through gate and canary.
        replay: where the held-out records are.
        progress: knows the step of the next candidate.
        pace: told what the gate said.
        status: where candidates are counted.
        spending: charged with each version.
        learnt: named in the manifest of each version.
        spare: waits until serving can spare the capacity for a micro-batch; False when the loop shall end.
        working: takes note of each one's work.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        publisher: Publisher,
        replay: Replay,
        progress: Progress,
        pace: Pace,
        status: Status,
        spending: Spending,
        learnt: Learnt,
        spare: Callable[[], bool],
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._steps = settings.steps_per_candidate
        self._publisher = publisher
        self._replay = replay
        self._progress = progress
        self._pace = pace
        self._status = status
        self._spending = spending
        self._learnt = learnt
        self._spare = spare
        self._working = working
        self._gate_after = 0.0
        self._canary_after = 0.0

    def due(self, distiller: Distiller) -> bool:
        """Whether it is time for a candidate."""
        return distiller.steps >= self._progress.next_gate and time.monotonic() >= self._gate_after

    def propose(self, distiller: Distiller) -> bool:
        """Propose the drafter; a rejected one is trained on from where it is. False when nothing could be published.

        Raises:
            StoppedError: the loop shall end.
        """
        status = self._status
        distiller.update()
        trained_on = {"records": status.trained, "tokens": status.tokens, "steps": distiller.steps}
        try:
            learnt = self._learnt.state()
            outcome = self._publisher.propose(distiller.drafter, self._held_out, trained_on, learnt)
        except RedisError as error:
            logger.warning("no candidate is published while Redis is gone: %s", error)
            self._gate_after = time.monotonic() + 2.0
            return False
        except (ValueError, OSError) as error:
            logger.error("a candidate could not be published: %s", error)
            self._gate_after = time.monotonic() + 10.0
            return False
        verdict = outcome.verdict
        logger.info("candidate at step %d: %s", distiller.steps, verdict.reason)
        status.gate = {"passed": verdict.passed, "reason": verdict.reason, **verdict.figures()}
        self._progress.next_gate = distiller.steps + (max(self._steps // 5, 1) if verdict.waits else self._steps)
        self._pace.judged(verdict, status.held_out)
        if outcome.version is not None:
            status.version = self._publisher.stable
            status.published += 1
            self._spending.published(outcome.version)
            self._learnt.published()
        elif not verdict.waits:
            status.rejected += 1
        return True

    def decide(self) -> None:
        """Promote the canary or roll it back when live requests or the clock say so."""
        canary = self._publisher.canary
        if canary is None or time.monotonic() < self._canary_after:
            return
        self._canary_after = time.monotonic() + _CANARY_SECONDS
        try:
            judgement = self._publisher.decide(time.time())
        except RedisError as error:
            logger.warning("nothing is decided on the canary while Redis is gone: %s", error)
            return
        if judgement is not None:
            self._status.canary = {**canary.figures(), "action": judgement.action, "reason": judgement.reason}

    def _held_out(self) -> Iterator[DistillBatch]:
        """The held-out positions in micro-batches, each as soon as serving can spare it."""
        for group in pack(self._replay.held_out(HELD_OUT_TOKENS), EVALUATION_TOKENS):
            if not self._spare():
                raise StoppedError
            with self._working():
                yield collate(group)
