"""``osd bench versions``: whether versions save what was expected of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Tokens, check_output, enough, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of


def versions(
    stream: Prompts = "unittest",
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second of independent users.")] = 1.0,
    blocks: Annotated[int, typer.Option(min=1, help="With each version.")] = 9,
    requests: Annotated[int, typer.Option(min=1, help="Of a block.")] = 30,
    tokens: Tokens = 96,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare what each version of the domain saves with what was expected of it, without recall.

    One engine answers each block of requests with every version in the registry, in turns. Writes a line of JSON for
    each block and one of figures to standard output, and the table, in seconds of a core saved in each second, to
    standard error.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    from benchmarks import versions as bench
    from benchmarks.ledger import Block, Plan
    from benchmarks.pair import BenchError, load_engine, reading_anew
    from osd.registry.place import storage_of
    from osd.registry.versions import Registry, VersionError
    from osd.traffic import load

    plan, domain = Plan(blocks, requests, tokens), settings.domain
    registry = Registry(storage_of(settings))
    try:
        known = [registry.load(domain, number) for number in registry.numbers(domain)]
    except VersionError as error:
        fail(error)
    if not bench.descent(known):
        fail(f"none of the {len(known)} drafter versions of domain {domain} came of another that is still there")
    with loading():
        texts = load(stream)
        engine, _ = load_engine(reading_anew(settings), "registry")
    longest = settings.engine.context - tokens
    asked = enough(engine.tokenizer, texts, longest, plan.prompts, stream, "--blocks and --requests")
    found: list[Block] = []

    def answered(block: Block) -> None:
        typer.echo(json.dumps(asdict(block)))
        found.append(block)

    try:
        with running(engine):
            gains = bench.measure(engine, known, asked, rate, plan, say, answered)
    except BenchError as error:
        fail(error)
    about = {"target": settings.target.source, "domain": domain, "stream": stream, "rate": rate, "tokens": tokens}
    about |= {"versions": [asdict(gain) for gain in gains]}
    typer.echo(json.dumps(about))
    show(bench.table(gains), stderr=True)
    write(json_file, {**about, "blocks": [asdict(block) for block in found]})
