"""``osd bench context``: what it saves, and loses, to read of a long context only the tokens that are selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from osd.cli.bench.options import Json, Turns, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import Settings, TokenSelectSettings, drafter_of

_PARTS = ("attention", "drafting", "reading")
_DEEPEST = 3  # tokens of a draft


def context(
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="attention: the time of attention alone, over random keys of several shapes; drafting: the target "
            "drafts over selected tokens and verifies over all of them; reading: the target itself reads selected "
            "tokens, beyond its trained length. May be given again; all of them by default.",
            metavar="PART",
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=512, max=1 << 20, help="Tokens of a context. May be given again."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text to read, by default Python's own language reference.", exists=True, dir_okay=False),
    ] = None,
    thresholds: Annotated[
        list[float] | None,
        typer.Option(
            "--threshold", min=0, max=1, help="Of drafting, by default that of the settings. May be given again."
        ),
    ] = None,
    needles: Annotated[int, typer.Option(min=0, help="Longest context with a needle to find.")] = 4096,
    ways: Annotated[
        list[str] | None,
        typer.Option("--way", help="Of reading: everything, yarn or selected. May be given again."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 64,
    turns: Turns = 15,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure token selection on contexts of 1,024 to 32,768 tokens, and say from which length it pays."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    chosen = parts or list(_PARTS)
    for part in chosen:
        if part not in _PARTS:
            fail(f"--part must be one of {', '.join(_PARTS)}, not {part}")
    asked = sorted(set(lengths or [1024 << power for power in range(6)]))
    given = drafter_of("token_select", settings.drafter)
    assert isinstance(given, TokenSelectSettings)  # noqa: S101  the kind that was asked for
    figures: dict[str, Any] = {"target": settings.target.source, "settings": given.model_dump()}
    if "attention" in chosen:
        figures["attention"] = _attention(asked, given, turns, settings.engine.threads)
    if "drafting" in chosen:
        figures["drafting"] = _drafting(settings, given, asked, thresholds or [given.threshold], text, tokens)
    if "reading" in chosen:
        figures["reading"] = _reading(settings, given, asked, text, needles, ways)
    write(json_file, figures)


def _attention(lengths: Sequence[int], given: TokenSelectSettings, turns: int, threads: int) -> list[dict[str, Any]]:
    from benchmarks.context.attention_time import SHAPES, measure, table
    from benchmarks.isolated import on_several_cores
    from osd.runtime.attention.selection import SelectionSizes

    sizes = SelectionSizes(given.initial, given.top, given.local, given.threshold)
    found = [
        one
        for shape in SHAPES
        for one in on_several_cores(lambda shape=shape: measure(shape, lengths, sizes, turns, say), threads)
    ]
    show(table(found, (0.1, 0.2, 1.0)))
    return [asdict(one) for one in found]


def _drafting(
    settings: Settings,
    given: TokenSelectSettings,
    lengths: Sequence[int],
    thresholds: Sequence[float],
    text: Path | None,
    tokens: int,
) -> list[dict[str, Any]]:
    from benchmarks.context import drafting
    from benchmarks.context.scaled import reaching
    from benchmarks.pair import engine_with
    from osd import drafters
    from osd.config import ChainSettings
    from osd.target.load import target_directory
    from osd.target.model import load_model

    engine_settings = settings.engine.model_copy(
        update={"slots": 1, "context": lengths[-1] + tokens, "prefill_chunk": 512, "prefix_cache": True}
    )
    growth = ChainSettings(depth=_DEEPEST, governed=False)
    settings = settings.model_copy(update={"engine": engine_settings, "drafter": given, "growth": growth})
    with loading(), reaching(target_directory(settings), engine_settings.context) as directory:
        try:
            drafter = drafters.initial(given, directory, settings.home_dir)
        except drafters.DrafterError as error:
            fail(error)
        engine = engine_with(settings, directory, drafter)
        model = load_model(directory, settings.target.dtype, settings.target.device)
    ids = _ids(engine.tokenizer, text, lengths[-1])
    with running(engine):
        found = list(drafting.measure(engine, model, ids, lengths, thresholds, tokens, say))
    show(drafting.table(found))
    say(drafting.pays(found))
    return [asdict(one) for one in found]


def _reading(
    settings: Settings,
    given: TokenSelectSettings,
    lengths: Sequence[int],
    text: Path | None,
    longest: int,
    ways: Sequence[str] | None,
) -> list[dict[str, Any]]:
    from benchmarks.context import extrapolation
    from benchmarks.context.extrapolation import CHUNK, WAYS, Reader, Reading
    from benchmarks.isolated import on_several_cores
    from osd.runtime.attention.selection import SelectionSizes
    from osd.target.load import load_tokenizer, target_directory

    for way in ways or ():
        if way not in WAYS:
            fail(f"--way must be one of {', '.join(WAYS)}, not {way}")
    if any(length % CHUNK for length in lengths):
        fail(f"--length must be a multiple of {CHUNK} where a text is read")
    with loading():
        directory = target_directory(settings)
        tokenizer = load_tokenizer(directory)
    ids = _ids(tokenizer, text, lengths[-1])
    sizes = SelectionSizes(given.initial, given.top, given.local, given.threshold)
    found: list[Reading] = []
    for way in ways or WAYS:
        with loading():
            reader = Reader(way, directory, settings.target.dtype, lengths[-1], sizes)

        def read(reader: Reader = reader, way: str = way) -> list[Reading]:
            sought = [length for length in lengths if length <= longest]
            return [
                *extrapolation.perplexities(reader, way, ids, lengths, say),
                *extrapolation.needles(reader, way, tokenizer, ids, sought, say),
            ]

        found += on_several_cores(read, settings.engine.threads)
    show(extrapolation.table(found))
    return [asdict(one) for one in found]


def _ids(tokenizer: Any, text: Path | None, least: int) -> list[int]:
    """The tokens of the text, or of Python's language reference."""
    from pydoc_data.topics import topics

    written = text.read_text(encoding="utf-8") if text else "\n\n".join(part for _, part in sorted(topics.items()))
    ids: list[int] = tokenizer(written, add_special_tokens=False)["input_ids"]
    if len(ids) < least:
        fail(f"--text has {len(ids)} tokens, and a context of {least} was asked for")
    return ids
