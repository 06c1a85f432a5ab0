"""``osd bench net``: what learning earns through the whole service, training charged."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Plot, say
from osd.cli.bench.recorded import (
    Markdown,
    Minutes,
    Most,
    Passes,
    Records,
    Tokens,
    check_files,
    check_kinds,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import drafter_of

_CAPTURE_TURNS = 7
_CAPTURE_PROMPTS = 48  # of one engine's 16 slots three waves: records are written while others decode


def net(
    before: Annotated[Path, typer.Option(help="Prompts that the first drafter is distilled on.", metavar="FILE")],
    stream: Annotated[Path, typer.Option(help="Prompts of the traffic, each sent once.", metavar="FILE")],
    arrivals: Annotated[
        Path, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens; it is stretched to the load.", metavar="FILE")
    ],
    drafter: Annotated[
        str, typer.Option(help="eagle, falcon, kangaroo, language_model, medusa or prompt_tokens.", metavar="KIND")
    ] = "eagle",
    load: Annotated[
        float, typer.Option(min=0.05, max=1, help="Of what the service with the first drafter can take.")
    ] = 0.6,
    requests: Annotated[int, typer.Option(min=16, help="Of each pass.")] = 300,
    turns: Annotated[int, typer.Option(min=1, help="Passes of each way.")] = 3,
    records: Records = 100,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    most: Most = 16.0,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Plot = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Send the same traffic to the service with the trainer on and off: speed, latency, CPU time, and capture's cost.

    Every pass begins with a drafter that was distilled on other traffic: it stays in service, or the trainer follows
    the traffic, or the versions that were trained come into service at the same times while nobody trains.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    check_kinds([drafter])
    if not settings.capture.enabled or not settings.serving.capture_default:
        fail("the trainer learns from what is captured: capture.enabled and serving.capture_default must be true")
    if settings.redis_url:
        fail("redis_url must not be set: each pass starts a Redis of its own")
    settings = settings.model_copy(update={"drafter": drafter_of(drafter, settings.drafter)})
    from benchmarks.adaptation import net as bench
    from benchmarks.adaptation.learner import distill
    from benchmarks.adaptation.net_tables import capacity_note, net_plots, net_table
    from benchmarks.adaptation.served import captured
    from benchmarks.adaptation.tables import served_table
    from benchmarks.pair import BenchError
    from deploy.embedded import START_ERRORS, check_port
    from osd.runtime.device import one_core
    from osd.traffic.arrivals import paced, read
    from osd.traffic.file import read as prompts_of
    from osd.traffic.prompt import TrafficError

    try:
        traffic = bench.Traffic.of(prompts_of(stream), paced(read(arrivals), None, tokens), requests)
        check_port(settings.serving.host, settings.serving.port)
    except (TrafficError, *START_ERRORS) as error:
        fail(error)
    opened = open_experiment(
        settings, [before], [drafter_of(drafter, settings.drafter)], records, _CAPTURE_PROMPTS, tokens, minutes
    )
    with opened as (experiment, (known,)):
        first = experiment.fresh(drafter)
        say(f"distilling on {len(known.arriving)} records of {known.name}")
        work = distill(first, known.arriving, experiment.recipe(passes, 8, 0), most)
        try:
            speed, traces = captured(experiment, first, known.unseen, _CAPTURE_TURNS, say)
            one_core()  # from here on the replica and the trainer compute, not this process
            target = settings.target.model_copy(update={"source": str(experiment.setup.directory)})
            service = settings.model_copy(update={"target": target})
            found = bench.net(service, bench.First(first.config(), first.weights()), traffic, load, turns, say)
        except (BenchError, *START_ERRORS) as error:
            fail(error)
    written, dropped = traces["written"], traces["dropped"]
    tables = [net_table(found), served_table(f"capture: {written} traces written, {dropped} dropped", speed)]
    figures = {
        "target": settings.target.source,
        "drafter": drafter,
        "trainer": settings.trainer.model_dump(),
        "before": {"name": known.name, "records": len(known.arriving), "work": asdict(work)},
        "stream": {"name": stream.stem, "requests": requests, "tokens": tokens},
        "arrivals": arrivals.name,
        "load": load,
        "capacity": asdict(found.capacity),
        "requests_per_second": found.rate,
        "turns": [{way: one.figures() for way, one in turn.items()} for turn in found.turns],
        "capture": {**asdict(speed), "traces": traces},
    }
    conclude(tables, net_plots(found), [capacity_note(found)], figures, (json_file, plot, markdown))
