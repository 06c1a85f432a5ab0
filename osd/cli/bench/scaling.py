"""``osd bench scaling``: drafters of several sizes after several amounts of traffic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import say
from osd.cli.bench.recorded import Interval, Minutes, Passes, Records, Tokens, Unseen, open_experiment
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import ChainSettings, LanguageModelSettings


def scaling(
    stream: Annotated[Path, typer.Option(help="JSON lines of prompts.", metavar="FILE")],
    points: Annotated[
        Path,
        typer.Option(help="JSON lines, one for each drafter; what is there is not measured again.", metavar="FILE"),
    ],
    layers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of the target, that a drafter has; may be given again. 1, 2, 4 and 6 by default."),
    ] = None,
    records: Records = 320,
    unseen: Unseen = 60,
    tokens: Tokens = 48,
    passes: Passes = 4.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of a draft.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="To take medians of.")] = 7,
    minutes: Minutes = 10.0,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train language models of several sizes along a stream, and measure each after 1/8, 1/4, 1/2 and all of it.

    On unseen records: the divergence from the target and the target's entropy, acceptance, the time of forwards and the
    speed-up in the engine; and the CPU seconds of training. The least amount comes first, for
    every size. A run that was cut off goes on after its last point. osd analyze scaling reads the points.
    """
    settings = settings_of(config, overrides)
    if points.is_dir() or not points.parent.is_dir():
        fail(f"--points: cannot write {points}")
    from benchmarks.adaptation import scaling as bench
    from benchmarks.pair import BenchError
    from osd.analysis.scaling.points import Run, ScalingError, read, write
    from osd.runtime.machine import Machine
    from osd.target.model import load_config

    if settings.engine.context < bench.CONTEXT:
        fail(f"engine.context must be at least {bench.CONTEXT}, what is timed, not {settings.engine.context}")
    growth = ChainSettings(depth=depth, governed=False)
    engine = settings.engine.model_copy(update={"max_draft": max(settings.engine.max_draft, bench.DEEPEST)})
    settings = settings.model_copy(update={"growth": growth, "verification": None, "engine": engine})
    try:
        found = read(points)
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
    if any(point.run != run for point in found):
        fail(f"--points: {points} holds points of other settings; name another file")
    opened = open_experiment(settings, [stream], [LanguageModelSettings()], records, unseen, tokens, minutes)
    with opened as (experiment, (recorded,)):
        deepest = load_config(experiment.setup.directory).num_hidden_layers
        for count in layers or ():
            if count > deepest:
                fail(f"--layers must be at most {deepest}, the target's, not {count}")
        sizes = sorted(set(layers or [count for count in bench.LAYERS if count <= deepest]))
        recipe = experiment.recipe(passes, interval, 0)
        done = {(point.layers, point.records) for point in found}
        try:
            for point in bench.scaling(experiment, recorded, sizes, recipe, run, done, points, say):
                found.append(point)
                write(points, found)
                typer.echo(
                    f"{point.layers} layers, {point.records} records: divergence {point.divergence:.3f} nats, "
                    f"accepted / tested {point.agreement:.3f}, tokens a round {point.length:.2f}, "
                    f"speed-up {point.speedup:.2f}, {point.cpu_seconds:.0f} CPU seconds of training"
                )
        except BenchError as error:
            fail(error)
