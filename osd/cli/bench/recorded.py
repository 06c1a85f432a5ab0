"""Options and habits that the commands on recorded streams share."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.cli.bench.options import TRAINED, check_output, loading, say, write
from osd.cli.common import fail
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from benchmarks.adaptation.experiment import Experiment, Stream
    from benchmarks.adaptation.report import Plot, Table
    from osd.config import DrafterSettings, Settings

Streams = Annotated[
    list[Path],
    typer.Option(
        "--stream", help="JSON lines of prompts, or unittest, stdlib or pydoc; may be given again.", metavar="FILE"
    ),
]
Kind = Annotated[str, typer.Option("--drafter", help=f"{TRAINED}.", metavar="KIND")]
Kinds = Annotated[list[str] | None, typer.Option("--drafter", help=f"{TRAINED}; all by default.", metavar="KIND")]
Records = Annotated[int, typer.Option(min=16, help="Of each stream, that arrive in order.")]
Unseen = Annotated[int, typer.Option(min=8, help="Further records of each stream, only measured on.")]
Tokens = Annotated[int, typer.Option(min=8, help="Of each completion at most.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="To record in what was not recorded before.")]
Passes = Annotated[float, typer.Option(min=0.5, help="Over each new completion, while learning online.")]
Most = Annotated[float, typer.Option(min=1, help="Passes of what is distilled beforehand.")]
Interval = Annotated[int, typer.Option(min=1, help="Records between two updates.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs with different samples.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables here, as Markdown.", metavar="FILE")]


@contextmanager
def open_experiment(
    settings: Settings,
    files: Sequence[Path],
    readers: Sequence[DrafterSettings],
    records: int,
    unseen: int,
    tokens: int,
    minutes: float,
) -> Generator[tuple[Experiment, list[Stream]]]:
    """An experiment with drafters of ``readers`` and its streams recorded, or the end of the command."""
    from benchmarks.adaptation.experiment import Experiment, Size
    from benchmarks.adaptation.recording import RecordingError
    from osd.drafters import DrafterError
    from osd.runtime.device import several_cores
    from osd.traffic import load

    if settings.trainer.samples != "teacher":
        fail(f"trainer.samples is {settings.trainer.samples}, and recorded text is the target's: set it to teacher")
    if len({file.stem for file in files}) < len(files):
        fail("--stream: each file needs a name of its own")
    with stop_signals():
        try:
            with loading():
                prompts = {file.stem: load(str(file)) for file in files}
                experiment = Experiment.of(settings, Size(records, unseen, tokens, minutes=minutes), readers, say)
            streams = [experiment.stream(name, some) for name, some in prompts.items()]
            several_cores(settings.engine.threads)
            yield experiment, streams
        except (RecordingError, DrafterError) as error:
            fail(error)


def check_kinds(asked: list[str] | None) -> list[str]:
    """The drafters to measure, or the end of the command."""
    from benchmarks.adaptation.experiment import KINDS

    for kind in asked or ():
        if kind not in KINDS:
            fail(f"--drafter must be one of {', '.join(KINDS)}, not {kind}")
    return asked or list(KINDS)


def check_files(json_file: Path | None, plot: Path | None, markdown: Path | None) -> None:
    """Refuse files that could not be written in the end."""
    check_output(json_file, plot)
    if markdown is not None and (markdown.is_dir() or not markdown.parent.is_dir()):
        fail(f"--markdown: cannot write {markdown}")


def conclude(
    tables: Sequence[Table],
    plots: Sequence[Plot],
    notes: Sequence[str],
    figures: Mapping[str, Any],
    files: tuple[Path | None, Path | None, Path | None],
) -> None:
    """Print the tables and the notes, and write the files for JSON, plots and Markdown."""
    from rich.console import Console

    from benchmarks.adaptation.report import write_markdown, write_plot

    console = Console(highlight=False, width=None if Console().is_terminal else 200)
    for table in tables:
        table.show(console)
        console.print()
    for note in notes:
        console.print(note, soft_wrap=True)
    json_file, plot, markdown = files
    write(json_file, figures)
    if plot is not None:
        write_plot(plot, plots)
    if markdown is not None:
        write_markdown(markdown, tables, notes)
