"""How drafters of several sizes do after several amounts of traffic: the points of a scaling law."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import Tensor

from benchmarks import decode
from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.learner import Recipe
from benchmarks.adaptation.offline_acceptance import total
from benchmarks.isolated import COMMITTED, DRAFT_CONTEXT, Drafting, forward_seconds, on_several_cores
from benchmarks.pair import BenchError, engine_with, reading_anew
from osd.analysis.scaling.points import Costs, Point, Run, Speed
from osd.capture.trace import Trace
from osd.config import LanguageModelSettings
from osd.drafters.autoregressive import AutoregressiveSession, autoregressive
from osd.drafters.base import Needs
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.session import Runtime
from osd.drafters.trainable import Trainable
from osd.engine.policy import Policy
from osd.learning.batch import collate, pack
from osd.learning.divergences import draft_index, forward_kl, overlap, total_variation
from osd.learning.online import EVALUATION_TOKENS, Learner, Local
from osd.runtime.causal_lm import ends_of
from osd.runtime.interface import Target
from trainer import checkpoint

LAYERS = (1, 2, 4, 6)
"""Sizes of the drafters, as far as the target has so many layers."""

DEEPEST = 8
"""Tokens of the longest draft whose verification is timed."""

CONTEXT = COMMITTED + DEEPEST + 1
"""Tokens that a sequence must have room for."""

_HALVINGS = 3
_TURNS = 15  # of the isolated forwards


def amounts(records: int) -> list[int]:
    """Records after which drafters are measured: an eighth, a quarter, a half, all."""
    return [records >> halvings for halvings in range(_HALVINGS, -1, -1)]


def scaling(
    experiment: Experiment,
    stream: Stream,
    layers: Sequence[int],
    recipe: Recipe,
    run: Run,
    done: Collection[tuple[int, int]],
    beside: Path,
    report: Callable[[str], None] = lambda step: None,
) -> Iterator[Point]:
    """Train a language model of each size along the stream, and measure it after each of the ``amounts``.

    The least amount comes first, for every size; training goes on from it.

    Args:
        experiment: its settings grow chains of ``run.depth`` tokens.
        stream: what arrives and what is only measured on.
        layers: of the target, that the drafters begin with.
        recipe: how they learn; nothing is gated.
        run: what the points share.
        done: (layers, records) of the points that are known and not measured again.
        beside: the file next to which the training of each size is kept between two amounts.
        report: told what is done.

    Raises:
        BenchError: what was kept is damaged.
    """
    for records, count in itertools.product(amounts(len(stream.arriving)), layers):
        if (count, records) in done:
            continue
        settings = experiment.settings.model_copy(update={"drafter": LanguageModelSettings(layers=count)})
        sized, kept = replace(experiment, settings=settings), beside.with_suffix(f".{count}-layers.safetensors")
        training = Training(recipe.learner(sized.fresh("language_model"), enough=0), recipe)
        training.resume(kept, run, stream.arriving[:records])
        report(f"{count} layers: records {training.records + 1} to {records} of {len(stream.arriving)}")
        training.follow(stream.arriving[training.records : records])
        training.save(kept, run)
        yield _point(sized, stream, training, run, count)
        if records == len(stream.arriving):
            kept.unlink()


@dataclass
class Training:
    """A drafter that learns from records as they come.

    Of ``records`` that came, ``tokens`` were trained on, repeats not counted, in ``cpu_seconds``; those that the replay
    holds out are not among them.
    """

    learner: Learner
    recipe: Recipe
    records: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0
    _budget: float = 0.0

    @property
    def drafter(self) -> Trainable:
        """What learns."""
        return self.learner.distiller.drafter

    def follow(self, traces: Sequence[Trace]) -> None:
        """Learn from these records; all that was learnt is in the drafter's weights afterwards."""
        began = time.process_time()
        learner, recipe = self.learner, self.recipe
        for start in range(0, len(traces), recipe.interval):
            for trace in traces[start : start + recipe.interval]:
                if learner.add(trace).part == "train":
                    self.tokens += trace.completion_ids.shape[0]
                    self._budget += recipe.passes * trace.completion_ids.shape[0]
            while self._budget > 0:
                self._budget -= learner.step(recipe.settings.micro_batch_tokens, Local()).positions
        learner.candidate()
        self.records += len(traces)
        self.cpu_seconds += time.process_time() - began

    def save(self, path: Path, run: Run) -> None:
        """Keep what ``resume`` needs."""
        tensors, learned = self.learner.state()
        mine = {"records": self.records, "tokens": self.tokens, "cpu_seconds": self.cpu_seconds, "budget": self._budget}
        checkpoint.save(path, tensors, {"run": msgspec.to_builtins(run), "learner": learned, **mine})

    def resume(self, path: Path, run: Run, traces: Sequence[Trace]) -> None:
        """Go on from what was kept of this run, if anything was, and it has learnt from none but ``traces``.

        Raises:
            BenchError: what was kept is damaged.
        """
        try:
            found = checkpoint.load(path)
        except checkpoint.CheckpointError as error:
            raise BenchError(f"{error}; delete {path}, and training begins again") from None
        if found is None:
            return
        tensors, state = found
        if state["run"] != msgspec.to_builtins(run) or state["records"] > len(traces):
            return
        for trace in traces[: state["records"]]:
            self.learner.add(trace)
        self.learner.replay.sample(sys.maxsize)  # none of them is new any more
        self.learner.resume(tensors, state["learner"])
        self.records, self.tokens = state["records"], state["tokens"]
        self.cpu_seconds, self._budget = state["cpu_seconds"], state["budget"]


def _point(experiment: Experiment, stream: Stream, training: Training, run: Run, layers: int) -> Point:
    drafter = training.drafter
    offline = experiment.offline_acceptance(drafter, stream)
    entropy, divergence, variation = held_out_loss(drafter, stream.unseen)
    counts = total([one.counts for one in offline.measure(drafter.weights(), stream.unseen)])
    costs, speed = _timed(experiment, drafter, _prompts(stream.unseen, run.tokens), run)
    trained = sum(weight.numel() for weight in drafter.trained().values())
    return Point(
        run=run,
        layers=layers,
        parameters=trained,
        used=trained + _head_parameters(drafter),
        records=training.records,
        tokens=training.tokens,
        positions=training.learner.counters.tokens,
        cpu_seconds=training.cpu_seconds,
        entropy=entropy,
        divergence=divergence,
        total_variation=variation,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        tested=counts.tested,
        costs=costs,
        speed=speed,
    )


def _head_parameters(drafter: Trainable) -> int:
    """Those of the target's head, that the drafter shares."""
    _, head = ends_of(cast(LanguageModel, drafter).model)
    return head.weight.numel()


@torch.inference_mode()
def held_out_loss(drafter: Trainable, traces: Sequence[Trace]) -> tuple[float, float, float]:
    """Means over every completion token of the target's entropy, of KL(target || drafter), and of total variation.

    The first two are in nats. All ids that a trace does not list count as one event.
    """
    drafter.eval()
    index = draft_index(drafter.draft_ids)
    found: list[Tensor] = []
    for group in pack(traces, EVALUATION_TOKENS):
        batch = collate(group)
        (logits,) = drafter.unroll(batch, 1)
        events = overlap(logits, batch.target_ids, batch.target_logp, batch.target_tail, index)
        target = torch.cat([events.p, events.p_tail[:, None]], 1)
        found.append(torch.stack([torch.special.entr(target).sum(1), forward_kl(events), total_variation(events)]))
    entropy, divergence, variation = torch.cat(found, 1).double().mean(1).tolist()
    return entropy, divergence, variation


def _prompts(traces: Sequence[Trace], tokens: int) -> list[tuple[int, ...]]:
    """Prompts that are answered in as many tokens as are asked for, all of them where there is none."""
    whole = [trace for trace in traces if trace.completion_ids.shape[0] == tokens]
    return [tuple(trace.prompt_ids.numpy().tolist()) for trace in whole or traces]


def _timed(
    experiment: Experiment, drafter: Trainable, prompts: Sequence[tuple[int, ...]], run: Run
) -> tuple[Costs, Speed]:
    settings = reading_anew(experiment.settings)
    engine = engine_with(settings, experiment.setup.directory, drafter)
    policy = Policy.of(settings.growth, settings.verification)
    speed, length = decode.against_plain(engine, prompts, run.turns, run.tokens, policy)
    runtime = Runtime.serving(1, DRAFT_CONTEXT, DEEPEST + 1, engine.target.device, engine.target)
    session = autoregressive(drafter.session(runtime))
    costs = on_several_cores(lambda: _costs(engine.target, session, drafter.needs, run, round(length)), run.threads)
    return costs, Speed(speed.median, speed.least, speed.most, length)


def _costs(target: Target, session: AutoregressiveSession, needs: Needs, run: Run, committed: int) -> Costs:
    drafting = Drafting(session, needs, target, 1)
    plains: list[float] = []
    steps: list[float] = []
    verify: list[list[float]] = []
    for turn in range(_TURNS + 1):
        plain = forward_seconds(target, 1, 1)
        many = [forward_seconds(target, 1, 1 + depth) / plain for depth in range(1, DEEPEST + 1)]
        step = drafting.seconds(run.depth, committed) / run.depth / plain
        if turn:
            plains.append(plain)
            steps.append(step)
            verify.append(many)
    drafting.close()
    medians = (statistics.median(rows) for rows in zip(*verify, strict=True))
    return Costs(statistics.median(plains), statistics.median(steps), tuple(medians))
