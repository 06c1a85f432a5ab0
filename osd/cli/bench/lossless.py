"""``osd bench lossless``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import CONTEXT, Json, check_draft, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of


def lossless(
    prompts: Annotated[
        list[str],
        typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file; several take turns.", metavar="SOURCE"),
    ] = ["unittest"],  # noqa: B006 - typer reads it and changes nothing
    draft: Annotated[
        list[str],
        typer.Option(
            help="eagle, language_model, skip_layers or registry, as in osd bench rules; may be given again.",
            metavar="KIND",
        ),
    ] = ["eagle", "language_model"],  # noqa: B006 - likewise
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Of each answer at most.")] = 16,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare greedy decoding in float32 with every drafter, growth policy and rule to plain decoding, token by token.

    Ends with 1 when an answer differs.
    """
    from benchmarks.lossless import compare, slots

    fixed = ["target.dtype=float32", f"engine.slots={slots()}", f"engine.context={CONTEXT}", "growth.governed=false"]
    settings = settings_of(config, [*(overrides or ()), *fixed])
    check_output(json_file)
    for kind in draft:
        check_draft(kind)
    from dataclasses import asdict
    from itertools import chain, zip_longest

    from benchmarks.pair import encode, load_engine
    from benchmarks.report import identity
    from osd.traffic import load

    with loading():
        texts = [text for text in chain(*zip_longest(*map(load, prompts))) if text is not None]
    found, figures = [], []
    for kind in draft:
        with loading():
            engine, name = load_engine(settings, kind)
        asked = encode(engine.tokenizer, texts[: 4 * count], settings.engine.context - tokens)[:count]
        if len(asked) < count:
            fail(f"--count: {', '.join(prompts)} hold only {len(asked)} prompts that are short enough, not {count}")
        with running(engine):
            tallies = compare(engine, asked, tokens, lambda done, name=name: say(f"{name}: {done} of {count} prompts"))
        show(identity(name, tallies))
        found += tallies
        figures += ({"draft": name, **asdict(tally), "identical": tally.identical} for tally in tallies)
        about = {"target": settings.target.source, "prompts": prompts, "count": count, "tokens": tokens}
        write(json_file, {**about, "ways": figures})
    different = sum(len(tally.differences) for tally in found)
    if different:
        near = sum(tally.ties for tally in found)
        say(f"osd: {different} answers differ from plain decoding, {near} of them where two tokens are all but equal")
        raise typer.Exit(1)
