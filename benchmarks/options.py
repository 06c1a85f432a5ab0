"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.config import TRAINED_SETTINGS

*_FIRST, _LAST = TRAINED_SETTINGS

TRAINED = f"{', '.join(_FIRST)} or {_LAST}"
"""Names of the trained drafter kinds, as text."""

Draft = Annotated[
    str,
    typer.Option(
        help="skip_layers: the target without some middle layers; registry: the newest version of the domain; "
        f"{TRAINED}: an untrained drafter with the configured settings.",
        metavar="KIND",
    ),
]
Prompts = Annotated[str, typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")]
Parallel = Annotated[int, typer.Option("--streams", min=1, help="Prompts decoded at the same time.")]
After = Annotated[int, typer.Option(min=1, help="Requests of the stream to serve before the measurement.")]
Tokens = Annotated[int, typer.Option(min=8, help="Maximum number of tokens of each completion.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns that the medians are taken over.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Share of the most probable tokens that are sampled.")]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0.01, max=2, help="Repeat the option for more tables.")
]
Drafts = Annotated[int, typer.Option(min=1, max=8, help="Number of drafted first tokens.")]
Depth = Annotated[int, typer.Option(min=1, max=8, help="Number of tokens on a draft path.")]
Contexts = Annotated[int, typer.Option(min=2, help="Positions in the text, for each temperature.")]

# Options of commands that use recorded streams.
StreamFile = Annotated[Path, typer.Option("--stream", help="JSON lines file with prompts.", metavar="FILE")]
Kind = Annotated[str, typer.Option("--drafter", help=f"{TRAINED}.", metavar="KIND")]
Kinds = Annotated[list[str] | None, typer.Option("--drafter", help=f"{TRAINED}; all by default.", metavar="KIND")]
Records = Annotated[int, typer.Option(min=16, help="Records of each stream that arrive one after another.")]
Unseen = Annotated[int, typer.Option(min=8, help="Further records of each stream, used for measurement only.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="Time limit for recording missing completions, in minutes.")]
Passes = Annotated[float, typer.Option(min=0.5, help="Training passes over each new completion when learning online.")]
Most = Annotated[float, typer.Option(min=1, help="Limit of training passes when a drafter is distilled offline.")]
Interval = Annotated[int, typer.Option(min=1, help="Records between two training updates.")]
