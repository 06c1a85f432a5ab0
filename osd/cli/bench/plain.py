"""``osd bench plain``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Tokens, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, settings_of
from osd.config import NoDrafterSettings


def plain(
    prompts: Prompts = "unittest",
    tokens: Tokens = 96,
    turns: Annotated[int, typer.Option(min=1, help="To take medians of.")] = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare plain decoding with transformers' generate(), and eight streams with one, taking turns."""
    settings = settings_of(config, overrides).model_copy(update={"drafter": NoDrafterSettings()})
    check_output(json_file)
    from dataclasses import asdict

    from benchmarks.pair import encode, plain_engine, reading_anew
    from benchmarks.plain import measure, ratios
    from benchmarks.report import turns_of
    from osd.traffic import load

    with loading():
        texts = load(prompts)
        engine, directory = plain_engine(reading_anew(settings))
    asked = encode(engine.tokenizer, texts, settings.engine.context - tokens)
    with running(engine):
        pairs = measure(engine, directory, asked, tokens, turns, say)
    show(turns_of(pairs))
    figures = {"target": settings.target.source, "tokens": tokens, "turns": [asdict(pair) for pair in pairs]}
    write(json_file, {**figures, "ratios": ratios(pairs)})
