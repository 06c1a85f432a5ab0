"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.config import TRAINED_SETTINGS

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
Parallel = Annotated[int, typer.Option("--streams", min=1, help="Prompts decoded at the same time.")]
After = Annotated[int, typer.Option(min=1, help="Requests of the stream that are served first.")]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens of each completion at most.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns that medians are taken of.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Top-p of both target and drafter.")]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0.01, max=2, help="May be given again for another table.")
]
Drafts = Annotated[int, typer.Option(min=1, max=8, help="Drafts of the first token.")]
Depth = Annotated[int, typer.Option(min=1, max=8, help="Tokens of a path.")]
Contexts = Annotated[int, typer.Option(min=2, help="Places of the text, for each temperature.")]

# Of recorded streams.
StreamFile = Annotated[Path, typer.Option("--stream", help="JSON lines of prompts.", metavar="FILE")]
Kind = Annotated[str, typer.Option("--drafter", help=f"{TRAINED}.", metavar="KIND")]
Kinds = Annotated[list[str] | None, typer.Option("--drafter", help=f"{TRAINED}; all by default.", metavar="KIND")]
Records = Annotated[int, typer.Option(min=16, help="Records of each stream that arrive in order.")]
Unseen = Annotated[int, typer.Option(min=8, help="Further records of each stream, only measured on.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="Minutes to record what was not recorded before.")]
Passes = Annotated[float, typer.Option(min=0.5, help="Passes over each new completion while learning online.")]
Most = Annotated[float, typer.Option(min=1, help="Passes of a drafter that is distilled beforehand.")]
Interval = Annotated[int, typer.Option(min=1, help="Records between two updates.")]
