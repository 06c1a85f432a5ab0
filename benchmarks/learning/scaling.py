"""``osd bench scaling``: drafters of several sizes after several amounts of traffic, the points of a scaling law."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from benchmarks.engine import decode
from benchmarks.engine.isolated import COMMITTED, DRAFT_CONTEXT, DraftTimer, forward_seconds, on_several_cores
from benchmarks.engines import autoregressive, engine_with, without_prefix_cache
from benchmarks.learning.experiment import Experiment, RecordedStream, open_experiment
from benchmarks.learning.learner import Recipe
from benchmarks.learning.offline_acceptance import sum_counts
from benchmarks.options import Interval, Minutes, Passes, Records, StreamFile, Tokens, Turns, Unseen
from benchmarks.turns import by_way, in_turns, ratios
from osd.analysis.scaling.points import Costs, Point, Run, ScalingError, Speed, read, write
from osd.capture.trace import Trace
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import say
from osd.config import ChainSettings, LanguageModelSettings
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Needs
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.session import Runtime
from osd.drafting.trainable import Trainable
from osd.engine.policy import Policy
from osd.learning.batch import collate, pack
from osd.learning.divergences import draft_index, forward_kl, overlap, total_variation
from osd.learning.online import EVALUATION_TOKENS, Learner, LocalExecutor
from osd.runtime.causal_lm import ends_of
from osd.runtime.machine import Machine
from osd.runtime.model import SlotModel
from osd.target.model import load_config

LAYERS = (1, 2, 4, 6)
"""Sizes of the drafters, up to the number of the target's layers."""

DEEPEST = 8
"""Tokens of the longest draft for timing verification."""

CONTEXT = COMMITTED + DEEPEST + 1
"""Smallest context of a sequence for the timing."""

_HALVINGS = 3
_TURNS = 15  # turns of the isolated forwards


def scaling(
    stream: StreamFile,
    points: Annotated[
        Path, typer.Option(help="JSON lines file of points; existing points are not measured again.", metavar="FILE")
    ],
    layers: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Target layers in a drafter; repeat the option for several. 1, 2, 4 and 6 by default."
        ),
    ] = None,
    records: Records = 320,
    unseen: Unseen = 60,
    tokens: Tokens = 48,
    passes: Passes = 4.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of a draft.")] = 4,
    turns: Turns = 7,
    minutes: Minutes = 10.0,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure drafters of several sizes along a stream.

    Measured on unseen records: the divergence from the target and the target's entropy, acceptance, the time of
    forwards and the speed-up in the engine; also the CPU seconds of training. An interrupted run trains the sizes with
    missing points again. osd analyze scaling reads the points.
    """
    settings = settings_of(config, overrides)
    if points.is_dir() or not points.parent.is_dir():
        fail(f"--points: cannot write {points}")
    context = settings.engine.context
    if context is not None and context < CONTEXT:
        fail(f"engine.context must be at least {CONTEXT} for the timing, not {context}")
    growth = ChainSettings(depth=depth, governed=False)
    engine = settings.engine.model_copy(update={"max_draft": max(settings.engine.max_draft, DEEPEST)})
    settings = settings.model_copy(update={"growth": growth, "verification": None, "engine": engine})
    try:
        measured = read(points)
    except ScalingError as error:
        fail(error)
    run = Run(
        target=settings.target.source,
        dtype=settings.target.dtype,
        weights=settings.target.weights,
        stream=stream.stem,
        records=records,
        unseen=unseen,
        tokens=tokens,
        passes=passes,
        interval=interval,
        depth=depth,
        turns=turns,
        trainer=settings.trainer.model_dump(mode="json"),
        threads=settings.engine.threads or os.cpu_count() or 1,
        machine=str(Machine.here()),
    )
    if any(point.run != run for point in measured):
        fail(f"--points: {points} has points of other settings: use another file")
    opened = open_experiment(settings, stream, [LanguageModelSettings()], records, unseen, tokens, minutes)
    with opened as (experiment, recorded):
        deepest = load_config(experiment.setup.directory).num_hidden_layers
        for count in layers or ():
            if count > deepest:
                fail(f"--layers must be at most the target's {deepest}, not {count}")
        sizes = sorted(set(layers or [count for count in LAYERS if count <= deepest]))
        recipe = experiment.recipe(passes, interval, 0)
        done = {(point.layers, point.records) for point in measured}
        for point in measure(experiment, recorded, sizes, recipe, run, done):
            measured.append(point)
            write(points, measured)
            typer.echo(
                f"{point.layers} layers, {point.records} records: divergence {point.divergence:.3f} nats, "
                f"accepted / tested {point.agreement:.3f}, tokens a step {point.length:.2f}, "
                f"speed-up {point.speedup:.2f}, {point.cpu_seconds:.0f} CPU seconds of training"
            )


def amounts(records: int) -> list[int]:
    """Return the numbers of records before each measurement: an eighth, a quarter, a half, all."""
    return [records >> halvings for halvings in range(_HALVINGS, -1, -1)]


def measure(
    experiment: Experiment,
    stream: RecordedStream,
    layers: Sequence[int],
    recipe: Recipe,
    run: Run,
    done: Collection[tuple[int, int]],
) -> Iterator[Point]:
    """Train a language model of each size along the stream, and measure it after each of the ``amounts``.

    The experiment's settings grow chains of ``run.depth`` tokens. Points with (layers, records) in ``done`` are not
    measured again. There is no gate.
    """
    for count in layers:
        missing = [records for records in amounts(len(stream.arriving)) if (count, records) not in done]
        if not missing:
            continue
        settings = experiment.settings.model_copy(update={"drafter": LanguageModelSettings(layers=count)})
        sized = replace(experiment, settings=settings)
        training = ScalingTraining(recipe.learner(sized.new_drafter("language_model"), enough=0), recipe)
        for records in amounts(len(stream.arriving)):
            say(f"{count} layers: records {training.records + 1} to {records} of {len(stream.arriving)}")
            training.follow(stream.arriving[training.records : records])
            if records in missing:
                yield _point(sized, stream, training, run, count)


@dataclass
class ScalingTraining:
    """Drafter that learns from arriving records."""

    learner: Learner
    recipe: Recipe
    records: int = 0  # number of arrived records
    tokens: int = 0  # trained tokens without repeats and without held-out records
    cpu_seconds: float = 0.0  # CPU time of training
    _budget: float = 0.0

    @property
    def drafter(self) -> Trainable:
        """Drafter that is trained."""
        return self.learner.distiller.drafter

    def follow(self, traces: Sequence[Trace]) -> None:
        """Learn from these records, and put the learnt state into the drafter's weights."""
        start_time = time.process_time()
        learner, recipe = self.learner, self.recipe
        for start in range(0, len(traces), recipe.interval):
            for trace in traces[start : start + recipe.interval]:
                if learner.add(trace).part == "train":
                    self.tokens += trace.completion_ids.shape[0]
                    self._budget += recipe.passes * trace.completion_ids.shape[0]
            while self._budget > 0:
                self._budget -= learner.step(recipe.settings.micro_batch_tokens, LocalExecutor()).positions
        learner.candidate()
        self.records += len(traces)
        self.cpu_seconds += time.process_time() - start_time


def _point(experiment: Experiment, stream: RecordedStream, training: ScalingTraining, run: Run, layers: int) -> Point:
    drafter = training.drafter
    offline = experiment.offline_acceptance(drafter, stream)
    entropy, divergence, variation = held_out_loss(drafter, stream.unseen)
    counts = sum_counts([text.counts for text in offline.measure(drafter.weights(), stream.unseen)])
    costs, speed = measure_speed(experiment, drafter, _prompts(stream.unseen, run.tokens), run)
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
    """Return the number of parameters of the target's head, which the drafter shares."""
    _, head = ends_of(cast(LanguageModel, drafter).model)
    return head.weight.numel()


@torch.inference_mode()
def held_out_loss(drafter: Trainable, traces: Sequence[Trace]) -> tuple[float, float, float]:
    """Return means over all completion tokens: the target's entropy, KL(target || drafter), and the total variation.

    The first two are in nats. All ids that a trace does not list count as one event.
    """
    drafter.eval()
    index = draft_index(drafter.draft_ids)
    losses: list[Tensor] = []
    for group in pack(traces, EVALUATION_TOKENS):
        batch = collate(group)
        (logits,) = drafter.unroll(batch, 1)
        events = overlap(logits, batch.target_ids, batch.target_logp, batch.target_tail, index)
        target = torch.cat([events.p, events.p_tail[:, None]], 1)
        losses.append(torch.stack([torch.special.entr(target).sum(1), forward_kl(events), total_variation(events)]))
    entropy, divergence, variation = torch.cat(losses, 1).double().mean(1).tolist()
    return entropy, divergence, variation


def _prompts(traces: Sequence[Trace], tokens: int) -> list[tuple[int, ...]]:
    """Return the prompts with answers of ``tokens`` tokens, or all prompts if there are none."""
    complete = [trace for trace in traces if trace.completion_ids.shape[0] == tokens]
    return [tuple(trace.prompt_ids.numpy().tolist()) for trace in complete or traces]


def measure_speed(
    experiment: Experiment, drafter: Trainable, prompts: Sequence[tuple[int, ...]], run: Run
) -> tuple[Costs, Speed]:
    """Return the times of the forwards, and the speed-up in the engine."""
    settings = without_prefix_cache(experiment.settings)
    engine = engine_with(settings, experiment.setup.directory, drafter)
    policy = Policy.of(settings.growth, settings.verification)
    speed, length = decode.speedup_over_plain(engine, prompts, run.turns, run.tokens, policy)
    runtime = Runtime.serving(1, DRAFT_CONTEXT, DEEPEST + 1, engine.target.device, engine.target)
    session = autoregressive(drafter.session(runtime))
    costs = on_several_cores(lambda: _costs(engine.target, session, drafter.needs, run, round(length)), run.threads)
    return costs, Speed(speed.median, speed.least, speed.most, length)


def _costs(target: SlotModel, session: AutoregressiveSession, needs: Needs, run: Run, committed: int) -> Costs:
    timer = DraftTimer(session, needs, target, 1)

    def forwards(turn: int) -> list[float]:
        rows = [forward_seconds(target, 1, 1 + depth) for depth in range(DEEPEST + 1)]
        return [*rows, timer.seconds(run.depth, committed) / run.depth]

    turns = by_way(in_turns({"all": forwards}, _TURNS))["all"]
    plain, *other_seconds = (list(seconds) for seconds in zip(*turns, strict=True))
    timer.close()
    *verify, step = (ratios(seconds, plain).median for seconds in other_seconds)
    return Costs(statistics.median(plain), step, tuple(verify))
