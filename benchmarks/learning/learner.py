"""Training on recorded text without a service: distillation, and online learning with simulated serving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from benchmarks.learning.offline_acceptance import DraftCounts, OfflineAcceptance
from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.gate import Gate
from osd.learning.online import MIN_HELD_OUT_TOKENS, PASSES, WORTHWHILE, Learner, LocalExecutor, empty_replay


@dataclass(frozen=True)
class Recipe:
    """Use of the trainer's settings without a clock."""

    settings: TrainerSettings  # settings of the trainer
    depth: int  # depth of the gate's evaluation
    vocabulary: int  # size of the target's vocabulary
    passes: float = PASSES  # training passes over each new completion
    interval: int = 8  # records between two updates
    gated: bool = True  # serve only weights that passed the gate, as in production; else the latest weights
    seed: int = 0  # seed of the replay

    def learner(self, drafter: Trainable, enough: int = MIN_HELD_OUT_TOKENS) -> Learner:
        """Return a learner that trains ``drafter`` in place and holds out at least ``enough`` tokens."""
        gate, replay = Gate(self.depth, self.settings.divergence), empty_replay(self.settings, self.seed, enough)
        return Learner(Distiller(drafter, self.settings), self.settings, gate, self.vocabulary, replay)


@dataclass
class TrainingWork:
    """Work and cost of training."""

    steps: int = 0
    positions: int = 0
    cpu_seconds: float = 0.0
    published: int = 0
    rejected: int = 0
    skipped: int = 0


class OnlineService:
    """Drafter that serves and learns: each record is drafted for before the learner trains on it.

    ``learner`` trains ``drafter`` in place. ``served`` is a copy of it, the drafter in service. It gets the trained
    weights when they pass the gate, or after each group of records if the recipe has no gate. ``work`` counts the
    training so far.
    """

    def __init__(self, drafter: Trainable, recipe: Recipe, offline: OfflineAcceptance) -> None:
        self._recipe, self._acceptance = recipe, offline
        self.learner = recipe.learner(drafter)
        self.served = deepcopy(drafter)
        self._budget = 0.0
        self.work = TrainingWork()

    @property
    def in_service(self) -> dict[str, Tensor]:
        """Weights in service; they change during learning."""
        return self.served.weights()

    def serve(self, traces: Sequence[Trace], report: Callable[[int], None] = lambda done: None) -> list[DraftCounts]:
        """Draft for the records and learn from them, in groups of ``Recipe.interval`` records.

        The weights in service draft for all records of a group before the learner gets the group.

        Args:
            traces: the records.
            report: is called after each group with the number of records so far.

        Returns:
            The counts of the drafts of each record.
        """
        counts: list[DraftCounts] = []
        for first in range(0, len(traces), self._recipe.interval):
            group = traces[first : first + self._recipe.interval]
            drafts = self._acceptance.measure(self.in_service, group)
            counts += [draft.counts for draft in drafts]
            start = time.process_time()
            for trace, draft in zip(group, drafts, strict=True):
                if self.learner.add(draft.mark(trace)).part == "train":
                    self._budget += self._recipe.passes * trace.completion_ids.shape[0]
            self._learn()
            self.work.cpu_seconds += time.process_time() - start
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
        self.served.load_weights(copy_weights(drafter))
        self.work.published += 1


def distill(drafter: Trainable, traces: Sequence[Trace], recipe: Recipe, max_passes: float) -> TrainingWork:
    """Distill a drafter in place on ``traces`` until it stops improving.

    A part of the records is held out as ``trainer.held_out`` says. Training stops when ``recipe.passes`` further passes
    do not reduce the held-out divergence by 1%, or after ``max_passes`` passes. The drafter keeps the best weights, or
    the last weights if nothing is held out.
    """
    start = time.process_time()
    learner = recipe.learner(drafter, enough=0)
    parts = [(learner.add(trace).part, trace.completion_ids.shape[0]) for trace in traces]
    tokens = sum(size for part, size in parts if part == "train")
    work, distiller = TrainingWork(), learner.distiller
    best: tuple[float, dict[str, Tensor]] | None = None
    while work.positions < max_passes * tokens:
        goal = min(work.positions + recipe.passes * tokens, max_passes * tokens)
        while work.positions < goal:
            work.positions += learner.step(recipe.settings.micro_batch_tokens, LocalExecutor()).positions
        distiller.update()
        figures = evaluate(drafter, learner.held_out(), recipe.depth, recipe.settings.divergence)
        if not figures.positions:
            continue
        lowest = best[0] if best else math.inf
        if figures.divergence < lowest:
            best = figures.divergence, copy_weights(drafter)
        if not figures.divergence < WORTHWHILE * lowest:
            break
    if best:
        drafter.load_weights(best[1])
    work.steps, work.skipped = distiller.steps, distiller.skipped
    work.cpu_seconds = time.process_time() - start
    return work


def copy_weights(drafter: Trainable) -> dict[str, Tensor]:
    """Return a copy of the drafter's weights."""
    return {name: weight.clone() for name, weight in drafter.weights().items()}
