"""The learner over recorded text: what it is given, how long it trains, and what drafts meanwhile. No service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from benchmarks.learning.offline_acceptance import Counts, OfflineAcceptance
from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.gate import Gate
from osd.learning.online import MIN_HELD_OUT_TOKENS, PASSES, WORTHWHILE, Learner, LocalExecutor, empty_replay


@dataclass(frozen=True)
class Recipe:
    """How the trainer's settings are used where no clock runs.

    ``passes`` over each new completion are trained when ``interval`` records have come, and nothing after that. With
    ``gated`` the service drafts with what last passed the gate, as it does in production; otherwise with whatever was
    trained last.
    """

    settings: TrainerSettings
    depth: int
    vocabulary: int
    passes: float = PASSES
    interval: int = 8
    gated: bool = True
    seed: int = 0

    def learner(self, drafter: Trainable, enough: int = MIN_HELD_OUT_TOKENS) -> Learner:
        """One that trains ``drafter`` in place; more is held out until ``enough`` tokens are."""
        gate, replay = Gate(self.depth, self.settings.divergence), empty_replay(self.settings, self.seed, enough)
        return Learner(Distiller(drafter, self.settings), self.settings, gate, self.vocabulary, replay)


@dataclass
class Work:
    """What training did and took."""

    steps: int = 0
    positions: int = 0
    cpu_seconds: float = 0.0
    published: int = 0
    rejected: int = 0
    skipped: int = 0


class Online:
    """A drafter that serves and learns: each record is drafted for first and learned from afterwards.

    Args:
        drafter: what serves in the beginning; it is trained in place.
        recipe: how it learns.
        offline: drafts for it.

    Attributes:
        served: the drafter in service.
        learner: what learns.
        work: what training did so far.
    """

    def __init__(self, drafter: Trainable, recipe: Recipe, offline: OfflineAcceptance) -> None:
        self._recipe, self._acceptance = recipe, offline
        self.learner = recipe.learner(drafter)
        self.served = deepcopy(drafter)
        self._budget = 0.0
        self.work = Work()

    @property
    def in_service(self) -> dict[str, Tensor]:
        """The weights that draft; they change as this learns."""
        return self.served.weights()

    def serve(self, traces: Sequence[Trace], report: Callable[[int], None] = lambda done: None) -> list[Counts]:
        """Draft for each record with what is in service when it comes, and learn from it."""
        counts: list[Counts] = []
        for start in range(0, len(traces), self._recipe.interval):
            group = traces[start : start + self._recipe.interval]
            drafted = self._acceptance.measure(self.in_service, group)
            counts += [one.counts for one in drafted]
            began = time.process_time()
            for trace, one in zip(group, drafted, strict=True):
                if self.learner.add(one.mark(trace)).part == "train":
                    self._budget += self._recipe.passes * trace.completion_ids.shape[0]
            self._learn()
            self.work.cpu_seconds += time.process_time() - began
            report(len(counts))
        return counts

    def _learn(self) -> None:
        learner, recipe = self.learner, self._recipe
        if not learner.ready:
            return
        while self._budget > 0:
            self._budget -= learner.step(recipe.settings.micro_batch_tokens, LocalExecutor()).positions
            if recipe.gated and learner.due:
                self._propose()
        self.work.steps, self.work.skipped = learner.distiller.steps, learner.distiller.skipped
        self.work.positions = learner.counters.tokens
        if not recipe.gated:
            self._publish(learner.candidate())

    def _propose(self) -> None:
        decision = self.learner.propose(self.served)
        if decision.passed:
            self._publish(self.learner.distiller.drafter)
        elif not decision.waits:
            self.work.rejected += 1

    def _publish(self, drafter: Trainable) -> None:
        self.served.load_weights(copied(drafter))
        self.work.published += 1


def distill(drafter: Trainable, traces: Sequence[Trace], recipe: Recipe, most: float) -> Work:
    """Distill a drafter in place on ``traces``, for as long as it gets better.

    What ``trainer.held_out`` keeps aside is not trained on: training ends when ``recipe.passes`` more over the rest do
    not bring its divergence down by a hundredth, and after ``most`` passes in all. The best weights stay, the last
    ones where nothing was kept aside.
    """
    began = time.process_time()
    learner = recipe.learner(drafter, enough=0)
    parts = [(learner.add(trace).part, trace.completion_ids.shape[0]) for trace in traces]
    tokens = sum(size for part, size in parts if part == "train")
    work, distiller = Work(), learner.distiller
    best: tuple[float, dict[str, Tensor]] | None = None
    while work.positions < most * tokens:
        goal = min(work.positions + recipe.passes * tokens, most * tokens)
        while work.positions < goal:
            work.positions += learner.step(recipe.settings.micro_batch_tokens, LocalExecutor()).positions
        distiller.update()
        figures = evaluate(drafter, learner.held_out(), recipe.depth, recipe.settings.divergence)
        if not figures.positions:
            continue
        before = best[0] if best else math.inf
        if figures.divergence < before:
            best = figures.divergence, copied(drafter)
        if not figures.divergence < WORTHWHILE * before:
            break
    if best:
        drafter.load_weights(best[1])
    work.steps, work.skipped = distiller.steps, distiller.skipped
    work.cpu_seconds = time.process_time() - began
    return work


def copied(drafter: Trainable) -> dict[str, Tensor]:
    """Weights that stay as they are while the drafter goes on learning."""
    return {name: weight.clone() for name, weight in drafter.weights().items()}
