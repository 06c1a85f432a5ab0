"""``osd bench governor``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import Draft, Json, Prompts, check_draft, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of


def governor(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    cycles: Annotated[int, typer.Option(min=1, help="Of the alternating load.")] = 5,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare the governor with plain decoding and fixed draft lengths while the load goes from 1 to 16 and back."""
    settings = settings_of(config, [*(overrides or ()), "growth.kind=chain", "growth.depth=4"])
    check_output(json_file)
    from dataclasses import asdict

    from benchmarks.governor import Load, measure
    from benchmarks.pair import encode, load_engine, reading_anew
    from benchmarks.report import speeds
    from osd.traffic import load

    check_draft(draft)
    plan = Load(cycles=cycles)
    if settings.engine.slots < plan.together:
        fail(f"engine.slots must be at least {plan.together}, not {settings.engine.slots}")
    with loading():
        texts = load(prompts)
        engine, name = load_engine(reading_anew(settings), draft)
    asked = encode(engine.tokenizer, texts, settings.engine.context - plan.tokens)
    with running(engine):
        found = measure(engine, asked, plan, say)
    show(speeds(found))
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "load": asdict(plan)}
    write(json_file, {**about, "ways": [asdict(speed) for speed in found]})
