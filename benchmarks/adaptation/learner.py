"""The trainer's loop over recorded text: replay, micro-steps, gate, a version in service. No service, no clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.adaptation.ruler import Counts, Ruler
from benchmarks.adaptation.samples import Draw
from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafters.trainable import Trainable
from osd.learning.batch import DistillBatch, collate, pack
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.gate import Gate
from osd.learning.replay import Replay
from trainer.candidates import EVALUATION_TOKENS, HELD_OUT_TOKENS
from trainer.intake import ENOUGH_TOKENS
from trainer.pace import PASSES, WORTHWHILE


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

    def replay(self, enough: int = 0) -> Replay:
        """An empty buffer; more is held out until ``enough`` tokens are."""
        settings = self.settings
        return Replay(settings.replay_tokens, settings.held_out, self.seed, settings.anchors, enough)


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
        ruler: drafts for it.
        draw: records with the drafter's own samples; must be given where ``trainer.samples`` asks for them.

    Attributes:
        served: the drafter in service.
        work: what training did so far, drawing samples included.
    """

    def __init__(self, drafter: Trainable, recipe: Recipe, ruler: Ruler, draw: Draw | None = None) -> None:
        if recipe.settings.samples != "teacher" and draw is None:
            raise ValueError(f"{recipe.settings.samples} samples need somebody who draws them")
        self._recipe, self._ruler, self._draw = recipe, ruler, draw
        self._replay = recipe.replay(ENOUGH_TOKENS)
        self._distiller = Distiller(drafter, recipe.settings)
        self.served = deepcopy(drafter)
        self._gate = Gate(recipe.depth, recipe.settings.divergence)
        self._budget = 0.0
        self._next_gate = recipe.settings.steps_per_candidate
        self._came = 0
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
            drafted = self._ruler.measure(self.in_service, group)
            counts += [one.counts for one in drafted]
            began = time.process_time()
            marked = [one.mark(trace) for trace, one in zip(group, drafted, strict=True)]
            for trace, sampled in zip(marked, self._sampled(marked), strict=True):
                if self._replay.add(trace if self._replay.holds_out(trace) else sampled).part == "train":
                    self._budget += self._recipe.passes * trace.completion_ids.shape[0]
            self._came += len(group)
            self._learn()
            self.work.cpu_seconds += time.process_time() - began
            report(len(counts))
        return counts

    def _sampled(self, group: list[Trace]) -> list[Trace]:
        """What is learned from these records: they themselves, or with what the drafter in service draws in them."""
        if self._draw is None or self._recipe.settings.samples == "teacher":
            return group
        return self._draw(self.in_service, group)

    def _learn(self) -> None:
        settings = self._recipe.settings
        if self._came < settings.min_records or not self._replay.train_records:
            return
        if not self._distiller.steps:
            adapt(self._distiller, self._replay, self._recipe.vocabulary)
        while self._budget > 0:
            batch = collate(self._replay.sample(settings.micro_batch_tokens).traces)
            self._distiller.step(batch)
            self._budget -= batch.positions
            self.work.positions += batch.positions
            if self._recipe.gated and self._distiller.steps >= self._next_gate:
                self._propose()
        self.work.steps, self.work.skipped = self._distiller.steps, self._distiller.skipped
        if not self._recipe.gated:
            self._distiller.update()
            adapt(self._distiller, self._replay, self._recipe.vocabulary)
            self._publish()

    def _propose(self) -> None:
        """Ask the gate, as ``trainer.candidates`` does."""
        self._distiller.update()
        adapt(self._distiller, self._replay, self._recipe.vocabulary)
        verdict = self._gate.judge(self._distiller.drafter, self.served, lambda: held_out(self._replay))
        every = self._recipe.settings.steps_per_candidate
        self._next_gate = self._distiller.steps + (max(every // 5, 1) if verdict.waits else every)
        if verdict.passed:
            self._publish()
        elif not verdict.waits:
            self.work.rejected += 1

    def _publish(self) -> None:
        self.served.load_weights(copied(self._distiller.drafter))
        self.work.published += 1


def distill(drafter: Trainable, traces: Sequence[Trace], recipe: Recipe, most: float) -> Work:
    """Distill a drafter in place on ``traces``, for as long as it gets better.

    What ``trainer.held_out`` keeps aside is not trained on: training ends when ``recipe.passes`` more over the rest do
    not bring its divergence down by a hundredth, and after ``most`` passes in all. The best weights stay, the last
    ones where nothing was kept aside.
    """
    began = time.process_time()
    replay = recipe.replay()
    parts = [(replay.add(trace).part, trace.completion_ids.shape[0]) for trace in traces]
    tokens = sum(size for part, size in parts if part == "train")
    work, distiller = Work(), Distiller(drafter, recipe.settings)
    if tokens:
        adapt(distiller, replay, recipe.vocabulary)
    best: tuple[float, dict[str, Tensor]] | None = None
    while work.positions < most * tokens:
        goal = min(work.positions + recipe.passes * tokens, most * tokens)
        while work.positions < goal:
            batch = collate(replay.sample(recipe.settings.micro_batch_tokens).traces)
            distiller.step(batch)
            work.positions += batch.positions
        distiller.update()
        figures = evaluate(drafter, held_out(replay), recipe.depth, recipe.settings.divergence)
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


def adapt(distiller: Distiller, replay: Replay, vocabulary: int) -> None:
    """Draft what the text uses by now, as the trainer does before each candidate."""
    distiller.adapt_vocabulary(torch.from_numpy(replay.token_counts(vocabulary)))


def held_out(replay: Replay) -> Iterator[DistillBatch]:
    """What the gate looks at."""
    for group in pack(replay.held_out(HELD_OUT_TOKENS), EVALUATION_TOKENS):
        yield collate(group)
