"""Command ``osd analyze tokenizer``: contents of vocabularies, their overlap, and their fit to the traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import AsJson, ConfigFile, Overrides, fail, redis_errors, redis_url, settings_of
from osd.cli.report import ReportFile, Table, check_files, say, show

if TYPE_CHECKING:
    from osd.analysis.tokenizer.findings import Setting
    from osd.analysis.tokenizer.passages import Passage
    from osd.config import Settings
    from osd.target.vocabulary import Vocabulary


def tokenizer(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A tokenizer.json, a directory with a tokenizer, or a value of target.source; first the target's.",
            metavar="SOURCE...",
        ),
    ],
    label: Annotated[
        list[str] | None,
        typer.Option(help="Name of a source; repeat it once for each source, in order.", metavar="NAME"),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Traffic: unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Traffic: traces that the service has captured.")] = False,
    records: Annotated[int, typer.Option(min=2, help="Number of newest traces to read.")] = 512,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.", metavar="FILE")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare vocabularies and, with --prompts or --traces, their fit to the traffic.

    The first SOURCE is the target's tokenizer; the other sources are tokenizers of models that could draft for it.
    """
    settings = settings_of(config, overrides)
    if prompts is not None and traces:
        fail("--prompts and --traces are two kinds of traffic: give only one")
    labels = _labels(sources, label or [])
    check_files(json_file, html=html)
    from osd.analysis.tokenizer import findings
    from osd.analysis.tokenizer.page import page
    from osd.analysis.tokenizer.structure import read
    from osd.files import replace
    from osd.target.vocabulary import VocabularyError

    try:
        vocabularies = [
            read(source, name, settings.cache_dir, say) for source, name in zip(sources, labels, strict=True)
        ]
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
    results = findings.findings(vocabularies, passages, traffic)
    setting = _setting(settings)
    figures = findings.figures(results, setting)
    try:
        if json_file is not None:
            replace(json_file, (json.dumps(figures, indent=2, ensure_ascii=False) + "\n").encode())
        if html is not None:
            replace(html, page(results, setting).encode())
    except OSError as error:
        fail(f"cannot write {error.filename or 'the figures'}: {error.strerror}")
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for table in findings.tables(results):
        typer.echo(f"{table.title}: {table.note}")
        show(Table("", table.head, [tuple(row) for row in table.rows]))
        typer.echo()
    for sentence in findings.conclusions(results, setting):
        typer.echo(sentence)


def _labels(sources: list[str], given: list[str]) -> list[str]:
    """Return a name for each source: the given names, or the last part of each source if it is unique."""
    if given and len(given) != len(sources):
        fail(f"--label is given {len(given)} times for {len(sources)} sources: give it once for each, or not at all")
    if given:
        labels = given
    else:
        paths = [Path(source) for source in sources]
        short = [path.parent.name if path.name == "tokenizer.json" else path.name for path in paths]
        labels = [
            name if name and short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)
        ]
    duplicates = sorted({name for name in labels if labels.count(name) > 1})
    if duplicates:
        fail(f"two sources would be called {duplicates[0]}: give each a name with --label")
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
        fail(f"--traces: no service runs in {settings.home_dir}; start it with osd up, or set redis_url")
    try:
        with redis_errors():
            return of_traces(newest(url, settings.capture.stream, records), target)
    except (NoTracesError, PassageError) as error:
        fail(f"--traces: {error}")


def _setting(settings: Settings) -> Setting | None:
    """Return the setting that limits the draft vocabulary of the configured drafter, or None."""
    from osd.analysis.tokenizer.findings import Setting

    ids = getattr(settings.drafter.distilled, "vocabulary", None)
    name = "drafter.trained.vocabulary" if settings.drafter.mixes else "drafter.vocabulary"
    return None if ids is None else Setting(name, ids)
