"""``osd bench ledger``: whether what the ledger says that drafts saved is true."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import (
    Json,
    Prompts,
    Tokens,
    check_draft,
    check_output,
    enough,
    loading,
    running,
    say,
    show,
    write,
)
from osd.cli.common import ConfigFile, Overrides, settings_of


def ledger(
    stream: Prompts = "unittest",
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or one of those of osd bench decode.", metavar="KIND")
    ] = "recall",
    users: Annotated[int, typer.Option(min=1, help="Who each wait for an answer before they ask again.")] = 4,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Requests a second of independent users, instead of --users.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="In both ways.")] = 11,
    requests: Annotated[int, typer.Option(min=1, help="Of a block.")] = 40,
    tokens: Tokens = 96,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare what the ledger says that drafts saved with the time that the same requests take without drafts.

    One engine answers each block of requests in both ways, in turns. Writes a line of JSON for each block and one of
    figures to standard output, and the table to standard error.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft, recalling=True)
    from benchmarks import ledger as bench
    from benchmarks.pair import load_engine, reading_anew
    from osd.traffic import load

    plan = bench.Plan(blocks, requests, tokens)
    with loading():
        texts = load(stream)
        engine, name = load_engine(reading_anew(settings), draft)
    longest = settings.engine.context - tokens
    asked = enough(engine.tokenizer, texts, longest, plan.prompts, stream, "--blocks and --requests")
    found: list[bench.Block] = []
    with running(engine):
        for block in bench.measure(engine, asked, bench.Traffic(users, rate), plan, say):
            typer.echo(json.dumps(asdict(block)))
            found.append(block)
    result = bench.conclude(found)
    about = {"target": settings.target.source, "stream": stream, "draft": name, "users": users, "rate": rate}
    about |= {"tokens": tokens, **asdict(result)}
    typer.echo(json.dumps(about))
    show(bench.table(result), stderr=True)
    write(json_file, {**about, "blocks": [asdict(block) for block in found]})
