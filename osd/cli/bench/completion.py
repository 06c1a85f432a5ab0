"""``osd bench completion``: completions that stop where they go wrong, and drafts and answers that leave early."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, loading, say
from osd.cli.bench.recorded import Markdown, Streams, check_files, conclude
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.signals import stop_signals


def completion(
    stream: Streams,
    records: Annotated[int, typer.Option(min=16, help="Completions to learn from.")] = 1000,
    unseen: Annotated[
        int,
        typer.Option(min=8, help="Completions of other texts, to measure on; thresholds are chosen on a quarter more."),
    ] = 3700,
    tokens: Annotated[int, typer.Option(min=2, max=64, help="Of each completion.")] = 10,
    passes: Annotated[float, typer.Option(min=0.5, help="Over the completions to learn from.")] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Completions to time, each in every way.")] = 16,
    json_file: Json = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Complete texts from where they are cut off at random, and compare thresholds of stops and of early exits.

    The texts are what users wrote in the stream, and the source files of Python's standard library, in turn. Heads and
    controller of a fresh early_exit drafter learn from half of the texts, thresholds are chosen on an eighth, and all
    figures are of the others.
    """
    small = ["engine.context=192", "engine.prefill_chunk=128", "capture.top_k=8", "trainer.replay_mb=8192"]
    settings = settings_of(config, [*small, *(overrides or ())])
    check_files(json_file, None, markdown)
    if len(stream) != 1:
        fail("--stream must be given once")
    from benchmarks.completion import Completions, measure, tables
    from benchmarks.pair import BenchError
    from benchmarks.prefixes import asked, library
    from osd.drafters import DrafterError
    from osd.traffic import load

    with stop_signals():
        try:
            with loading():
                bench = Completions(settings, [asked(load(str(stream[0]))), library()], tokens)
            found = measure(bench, records, unseen, passes, turns, say)
        except (BenchError, DrafterError) as error:
            fail(error)
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    figures = {**about, "tokens": tokens, **asdict(found)}
    conclude(tables(f"{stream[0].stem} and the standard library", found), (), (), figures, (json_file, None, markdown))
