"""``osd bench http``: the way from a client to the engine and back, beside the engine alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Tokens, Turns, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, key_of, settings_of

_PLAIN = ["drafter.kind=none", "trainer.enabled=false", "serving.replicas=1"]


def http(
    prompts: Prompts = "unittest",
    users: Annotated[list[int], typer.Option(min=1, help="Who ask at the same time; may be given again.")] = [1, 8, 64],  # noqa: B006 - typer reads it and changes nothing
    requests: Annotated[int, typer.Option(min=1, help="Of each user in a turn.")] = 2,
    tokens: Tokens = 64,
    turns: Turns = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure what a service's HTTP, Ray and JSON cost beside the same engine in this process.

    Both decode plainly, greedily and past the end of answers, so that they do the same work.
    """
    settings = settings_of(config, [*(overrides or []), *_PLAIN])
    check_output(json_file)
    from benchmarks import over_http as bench
    from benchmarks.pair import BenchError, plain_engine
    from deploy.assembly import START_ERRORS
    from deploy.embedded import Embedded
    from osd.traffic import load

    plan = bench.Plan(tuple(users), requests, tokens, turns)
    with loading():
        texts = load(prompts)[: max(users) * requests]
        engine, _ = plain_engine(settings)
    with ExitStack() as ends:
        ends.enter_context(running(engine))
        try:
            url = ends.enter_context(Embedded(settings, say)).url
            found = list(bench.measure(engine, url, key_of(settings), texts, plan, say))
        except (BenchError, *START_ERRORS) as error:
            fail(error)
    show(bench.table(found))
    about = {"target": settings.target.source, "prompts": prompts, "tokens": tokens, "requests": requests}
    write(json_file, {**about, "blocks": [asdict(block) for block in found]})
