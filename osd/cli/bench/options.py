"""Options and habits that the commands which measure share."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.cli.common import fail
from osd.cli.signals import stop_signals
from osd.config import TRAINED_SETTINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from osd.engine.engine import Engine
    from osd.traffic.prompt import Prompt

*_MOST, _LAST = TRAINED_SETTINGS

TRAINED = f"{', '.join(_MOST)} or {_LAST}"
"""The kinds of drafters that are trained, in words."""

Draft = Annotated[
    str,
    typer.Option(
        help="skip_layers: the target without some middle layers; registry: the newest version of the domain; "
        f"{TRAINED}: a fresh one, as the settings say.",
        metavar="KIND",
    ),
]
Prompts = Annotated[str, typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0.01, max=2, help="May be given again for another table.")
]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Of both target and drafter.")]
Drafts = Annotated[int, typer.Option(min=1, max=8, help="Drafts of the first token.")]
Depth = Annotated[int, typer.Option(min=1, max=8, help="Tokens of a path.")]
Contexts = Annotated[int, typer.Option(min=2, help="Places of the text, for each temperature.")]
Tokens = Annotated[int, typer.Option(min=8, help="Of each completion.")]
Turns = Annotated[int, typer.Option(min=1, help="To take medians of.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture here, as SVG.", metavar="FILE")]

CONTEXT = 512
"""Tokens of a sequence where a measurement chooses them itself."""

_WIDTH = 200  # characters


def check_draft(draft: str, recalling: bool = False) -> None:
    """Refuse a drafter that is none of those to choose from, which may be ``recalling`` ones."""
    from benchmarks.pair import DRAFTS, RECALLING

    choice = (*DRAFTS, *RECALLING) if recalling else DRAFTS
    if draft not in choice:
        fail(f"--draft must be one of {', '.join(choice)}, not {draft}")


def check_output(json_file: Path | None, plot: Path | None = None, html: Path | None = None) -> None:
    """Refuse files that could not be written in the end."""
    for name, file in (("--json", json_file), ("--plot", plot), ("--html", html)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fail(f"{name}: cannot write {file}")
    if plot is not None and plot.suffix != ".svg":
        fail(f"--plot: the name must end with .svg, not {plot.name}")


@contextmanager
def loading() -> Generator[None]:
    """Load models and prompts on one core, without progress bars; what cannot be had ends the command."""
    from transformers.utils import logging

    from benchmarks.pair import BenchError
    from osd.runtime.device import one_core
    from osd.target.load import TargetError
    from osd.traffic.prompt import TrafficError

    one_core()  # loading makes threads of its own
    logging.disable_progress_bar()
    try:
        yield
    except (BenchError, TargetError, TrafficError) as error:
        fail(error)


def short_enough(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Prompt], longest: int, source: str
) -> list[tuple[int, ...]]:
    """The token ids of prompts that have at most ``longest``, or the end of the command."""
    from benchmarks.pair import encode

    asked = encode(tokenizer, texts, longest)
    if not asked:
        fail(f"--prompts: {source} holds no prompt of at most {longest} tokens")
    return asked


def enough(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Prompt], longest: int, count: int, source: str, options: str
) -> list[tuple[int, ...]]:
    """The token ids of ``count`` prompts of at most ``longest``; too few end the command, which names its options."""
    from benchmarks.pair import encode

    asked = encode(tokenizer, texts, longest)[:count]
    if len(asked) < count:
        fail(f"{options}: {source} has {len(asked)} prompts of at most {longest} tokens, not {count}")
    return asked


@contextmanager
def running(engine: Engine) -> Generator[None]:
    """Run an engine until the command ends, in whatever way."""
    with stop_signals():
        engine.start()
        try:
            yield
        finally:
            engine.stop()


def say(step: str) -> None:
    """Tell on standard error what is being measured."""
    typer.echo(step, err=True)


def show(table: Any, stderr: bool = False) -> None:
    """Print a table, with all of its columns where no terminal says how wide it is."""
    import sys

    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    Console(stderr=stderr, highlight=False, width=None if terminal else _WIDTH).print(table)


def write(json_file: Path | None, figures: Mapping[str, Any]) -> None:
    """Write all figures, where asked to."""
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
