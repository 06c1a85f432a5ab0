"""``osd bench scheduling``: a long prompt beside requests that decode, and the second turn of a long chat."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Turns, check_draft, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of


def scheduling(
    prompts: Prompts = "unittest",
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or one of those of osd bench decode.", metavar="KIND")
    ] = "recall",
    streams: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 4,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt.")] = 2000,
    turns: Turns = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the times between tokens while a long prompt is read, and without it; and a chat's second turn."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft, recalling=True)
    from benchmarks import scheduling as bench
    from benchmarks.pair import BenchError, encode, load_engine
    from osd.traffic import load

    if settings.engine.slots <= streams:
        fail(f"--streams must be below engine.slots {settings.engine.slots}, not {streams}")
    if settings.engine.context < 2 * prompt:
        fail(f"--prompt {prompt} needs engine.context of at least {2 * prompt}, not {settings.engine.context}")
    with loading():
        texts = load(prompts)
        engine, name = load_engine(settings, draft)
    asked = encode(engine.tokenizer, texts, settings.engine.context // 4)
    try:
        with running(engine):
            found = list(bench.measure(engine, asked, bench.Plan(streams, prompt, 32, turns), say))
    except BenchError as error:
        fail(error)
    show(bench.table(found))
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "prompt": prompt}
    write(json_file, {**about, "turns": [asdict(turn) for turn in found]})
