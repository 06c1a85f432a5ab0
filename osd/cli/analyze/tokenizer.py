"""``osd analyze tokenizer``: what vocabularies hold, and how they fit each other and the traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of
from osd.cli.report import Json, Table, check_files, say, show

if TYPE_CHECKING:
    from osd.analysis.tokenizer.findings import Setting
    from osd.analysis.tokenizer.passages import Passage
    from osd.config import Settings
    from osd.target.vocabulary import Vocabulary


def tokenizer(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A tokenizer.json, a directory with a tokenizer, or what target.source takes; first the target's.",
            metavar="SOURCE...",
        ),
    ],
    label: Annotated[
        list[str] | None,
        typer.Option(help="A name for the source at the same place; given once for each.", metavar="NAME"),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Traffic: unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Traffic: what the service has captured.")] = False,
    records: Annotated[int, typer.Option(min=2, help="Newest traces to read.")] = 512,
    json_file: Json = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.", metavar="FILE")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Say what vocabularies hold and share and, with --prompts or --traces, how they fit the traffic.

    The first SOURCE is the target's tokenizer, and the others are those of models that might draft for it.
    """
    settings = settings_of(config, overrides)
    if prompts is not None and traces:
        fail("--prompts and --traces are two kinds of traffic: give one of them")
    labels = _labels(sources, label or [])
    check_files(json_file, html=html)
    from osd.analysis.tokenizer import findings
    from osd.analysis.tokenizer.page import page
    from osd.analysis.tokenizer.structure import read
    from osd.files import replace
    from osd.target.vocabulary import VocabularyError

    try:
        vocabularies = [read(one, name, settings.home_dir, say) for one, name in zip(sources, labels, strict=True)]
    except VocabularyError as error:
        fail(f"SOURCE: {error}")
    passages: list[Passage] = []
    traffic = None
    if prompts is not None:
        traffic = f"prompts, {prompts}"
        passages = _prompts(prompts, vocabularies[0])
    elif traces:
        traffic = f"answers, from the stream {settings.capture.stream}"
        passages = _traces(settings, records, vocabularies[0])
    found = findings.findings(vocabularies, passages, traffic)
    setting = _setting(settings)
    try:
        if json_file is not None:
            figures = findings.figures(found, setting)
            replace(json_file, (json.dumps(figures, indent=2, ensure_ascii=False) + "\n").encode())
        if html is not None:
            replace(html, page(found, setting).encode())
    except OSError as error:
        fail(f"cannot write {error.filename or 'the figures'}: {error.strerror}")
    for table in findings.tables(found):
        typer.echo(f"{table.title}: {table.note}")
        show(Table("", table.head, [tuple(row) for row in table.rows]))
        typer.echo()
    for sentence in findings.conclusions(found, setting):
        typer.echo(sentence)


def _labels(sources: list[str], given: list[str]) -> list[str]:
    """A name for each source: those given, or the last part of the source that tells it from the others."""
    if given and len(given) != len(sources):
        fail(f"--label is given {len(given)} times for {len(sources)} sources: give it once for each, or not at all")
    if given:
        labels = given
    else:
        paths = [Path(one) for one in sources]
        short = [path.parent.name if path.name == "tokenizer.json" else path.name for path in paths]
        labels = [name if name and short.count(name) == 1 else one for name, one in zip(short, sources, strict=True)]
    twice = sorted({name for name in labels if labels.count(name) > 1})
    if twice:
        fail(f"two sources would be called {twice[0]}: give each a name with --label")
    return labels


def _prompts(source: str, target: Vocabulary) -> list[Passage]:
    from osd.analysis.tokenizer.passages import PassageError, of_prompts
    from osd.traffic import load
    from osd.traffic.prompt import TrafficError

    try:
        return of_prompts(load(source), target)
    except (TrafficError, PassageError) as error:
        fail(f"--prompts: {error}")


def _traces(settings: Settings, records: int, target: Vocabulary) -> list[Passage]:
    from osd.analysis.tokenizer.passages import PassageError, of_traces
    from osd.capture.tail import NoTracesError, newest

    url = redis_url(settings)
    if url is None:
        fail(f"--traces: nothing runs in {settings.home_dir}; start it with osd up, or set redis_url")
    try:
        return of_traces(newest(url, settings.capture.stream, records), target)
    except (NoTracesError, PassageError) as error:
        fail(f"--traces: {error}")


def _setting(settings: Settings) -> Setting | None:
    """What limits the draft vocabulary of the configured drafter, if anything does."""
    from osd.analysis.tokenizer.findings import Setting

    ids = getattr(settings.drafter.distilled, "vocabulary", None)
    name = "drafter.trained.vocabulary" if settings.drafter.mixes else "drafter.vocabulary"
    return None if ids is None else Setting(name, ids)
