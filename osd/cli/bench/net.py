"""``osd bench net``: what learning earns through the whole service, training charged."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Plot, say
from osd.cli.bench.recorded import (
    Kind,
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
    stream: Annotated[
        list[Path],
        typer.Option(help="Prompts of the traffic, each sent once; may be given again, to follow.", metavar="FILE"),
    ],
    arrivals: Annotated[
        Path, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens; it is stretched to the load.", metavar="FILE")
    ],
    drafter: Kind = "eagle",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, frozen, trained, recall, recall + frozen or recall + trained; may be given again.",
            show_default="all",
        ),
    ] = None,
    load: Annotated[float, typer.Option(min=0.05, max=1, help="Of what the service can take without drafts.")] = 0.6,
    valley: Annotated[
        bool, typer.Option("--valley", help="For a fifth of the time a tenth of the requests arrive.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Answers may have all of --tokens, whatever the trace says.")
    ] = False,
    requests: Annotated[int, typer.Option(min=16, help="Of each stream in a pass.")] = 300,
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
    """Send the same traffic to the service, plain, with drafters, with recall, trained and not: does training pay?

    Every service with a trained drafter begins with one that was distilled on other traffic. It stays, or the trainer
    follows the traffic; alone, or beside recall. Passes are kept in the home directory: a command that was cut off goes
    on, and one with more turns adds to those before.
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
    from benchmarks.adaptation.engine_costs import costs_of_ways, prompted
    from benchmarks.adaptation.learner import distill
    from benchmarks.adaptation.net_tables import capacity_note, net_plots, net_tables
    from benchmarks.adaptation.served import Captured, captured
    from benchmarks.adaptation.tables import served_table
    from benchmarks.pair import BenchError
    from deploy.assembly import START_ERRORS
    from deploy.embedded import check_port
    from osd.runtime.device import one_core, several_cores
    from osd.traffic.arrivals import paced, read
    from osd.traffic.file import read as prompts_of
    from osd.traffic.prompt import TrafficError

    unknown = [one for one in way or () if one not in bench.WAYS]
    if unknown:
        fail(f"--way must be one of {', '.join(bench.WAYS)}, not {unknown[0]!r}")
    ways = [one for one in bench.WAYS if not way or one in way]
    try:
        arriving = read(arrivals)
        if full:
            arriving = [replace(one, tokens=tokens) for one in arriving]
        streams = [prompts_of(one) for one in stream]
        traffic = bench.Traffic.of(streams, paced(arriving, None, tokens), requests, valley)
        check_port(settings.serving.host, settings.serving.port)
    except (TrafficError, *START_ERRORS) as error:
        fail(error)
    opened = open_experiment(settings, [before], [settings.drafter], records, _CAPTURE_PROMPTS, tokens, minutes)
    with opened as (experiment, (known,)):
        knows = [known.name, [trace.request_id for trace in known.arriving], passes, most]
        results = bench.Results(settings, knows, traffic)
        fresh = experiment.fresh(drafter)

        def learn() -> None:
            say(f"distilling on {len(known.arriving)} records of {known.name}")
            distill(fresh, known.arriving, experiment.recipe(passes, 8, 0), most)

        def capturing() -> Captured:
            return captured(experiment, fresh, known.unseen, _CAPTURE_TURNS, say)

        def common() -> bench.Passes:
            costs = costs_of_ways(settings, experiment, fresh, known.arriving, found.trained_per_second, say)
            asked = prompted(traffic.arrivals, traffic.prompts, experiment.setup.tokenizer)
            return bench.Passes(settings.model_dump(mode="json"), asked, valley, costs)

        try:
            first = results.first(settings.domain, fresh, learn)
            one_core()  # the replica and the trainer compute, not this process
            target = settings.target.model_copy(update={"source": str(experiment.setup.directory)})
            service = settings.model_copy(update={"target": target})
            found = bench.net(service, results, first, traffic, load, turns, say, ways)
            several_cores(settings.engine.threads)
            results.once("service", bench.Passes, common)
            capture = results.once("capture", Captured, capturing)
        except (BenchError, *START_ERRORS) as error:
            fail(error)
    figures = {
        "target": settings.target.source,
        "drafter": drafter,
        "trainer": settings.trainer.model_dump(),
        "before": {"name": known.name, "records": len(known.arriving)},
        "streams": {"names": [one.stem for one in stream], "requests": requests, "tokens": tokens, "full": full},
        "arrivals": {"name": arrivals.name, "valley": valley},
        "load": load,
        "capacity": asdict(found.capacity),
        "requests_per_second": found.rate,
        "turns": [{way: one.figures() for way, one in turn.items()} for turn in found.turns],
        "capture": asdict(capture),
    }
    title = f"capture: {capture.traces['written']} traces written, {capture.traces['dropped']} dropped"
    tables = [*net_tables(found), served_table(title, capture.speeds)]
    conclude(tables, net_plots(found), [capacity_note(found)], figures, (json_file, plot, markdown))
