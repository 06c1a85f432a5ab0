"""``osd bench recall``: what a table of what the target said earns, from the first request on."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, check_draft, check_output, enough, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import BestFirstSettings


def recall(
    stream: Prompts = "unittest",
    draft: Annotated[
        str | None,
        typer.Option(help="Also with a drafter: one of those of osd bench decode.", metavar="KIND"),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Prompts decoded at the same time.")] = 1,
    after: Annotated[int, typer.Option(min=1, help="Requests of the stream that are served first.")] = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Unseen ones behind them, to measure on.")] = 32,
    tokens: Annotated[int, typer.Option(min=8, help="Of each completion at most.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve a stream to a table that is empty at first, and compare recall with other ways to decode what follows.

    The first requests of the stream are decoded plainly too. Writes a line of JSON for each wave and one of figures to
    standard output, and the tables to standard error. Recall drafts as much as pays, a drafter as it does by default.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    if draft is not None:
        check_draft(draft)
    from benchmarks import recall as bench
    from benchmarks.pair import BenchError, find_drafter
    from benchmarks.recall_figures import conclude
    from benchmarks.recall_tables import tables
    from osd.engine.request import SamplingParams
    from osd.target.load import target_directory
    from osd.traffic import load

    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")
    if prompts < streams:
        fail(f"--prompts must be at least --streams {streams}, not {prompts}")
    with loading():
        texts = load(stream)
        directory = target_directory(settings)
        drafter, name = (None, None) if draft is None else find_drafter(settings, draft, directory)
        growth = settings.growth if settings.growth.kind == "best_first" else BestFirstSettings()
        reused = settings.engine.model_copy(update={"prefix_cache": True})
        settings = settings.model_copy(update={"growth": growth, "verification": None, "engine": reused})
        setup = bench.Setup.of(settings, directory, drafter)
    engine = setup.engine
    longest = settings.engine.context - tokens
    needed = after + prompts
    asked = enough(engine.tokenizer, texts, longest, needed, stream, "--after and --prompts")
    plan = bench.Plan(streams, after, prompts, tokens, SamplingParams(temperature=temperature))
    waves: list[bench.Wave] = []
    try:
        with running(engine):
            for wave in bench.serve(setup, asked, plan, say):
                typer.echo(json.dumps(wave.figures()))
                waves.append(wave)
        found = conclude(setup, waves, asked[after:])
    except BenchError as error:
        fail(error)
    about = {"target": settings.target.source, "stream": stream, "draft": name, "streams": streams, "after": after}
    about |= {"prompts": prompts, "tokens": tokens, "temperature": temperature, **found.figures()}
    typer.echo(json.dumps(about))
    show(tables(found), stderr=True)
    write(json_file, {**about, "waves": [wave.figures() for wave in waves]})
