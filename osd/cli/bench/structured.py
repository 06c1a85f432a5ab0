"""``osd bench structured``: what it costs to hold answers to a JSON Schema."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Tokens, check_draft, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, Temperature, fail, settings_of


def structured(
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or one of those of osd bench decode.", metavar="KIND")
    ] = "mixed",
    streams: Annotated[int, typer.Option(min=1, help="Answers at the same time.")] = 1,
    blocks: Annotated[int, typer.Option(min=1, help="In each way.")] = 5,
    waves: Annotated[int, typer.Option(min=1, help="Of a block, each of as many prompts as streams.")] = 6,
    tokens: Tokens = 96,
    temperature: Temperature = 0.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare answers that are held to a JSON Schema with free ones to the same prompts, with drafts and without.

    The ways take turns in one engine. The schemas are those of a flat record, a nested invoice and a classifier.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft, recalling=True)
    from benchmarks import structured as bench
    from benchmarks.pair import BenchError, load_engine, reading_anew

    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")
    with loading():
        engine, name = load_engine(reading_anew(settings), draft)
    plan = bench.Plan(blocks, waves, streams, tokens, temperature)
    found: list[bench.Block] = []
    try:
        with running(engine):
            for schema in bench.SCHEMAS:
                mine = list(bench.measure(engine, schema, plan, say))
                show(bench.table(mine))
                found += mine
    except BenchError as error:
        fail(error)
    about = {"target": settings.target.source, "draft": name, **asdict(plan)}
    write(json_file, {**about, "found": [asdict(block) for block in found]})
