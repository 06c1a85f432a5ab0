"""``osd analyze``: what captured traffic says, and the reports that are looked at before a decision."""

from __future__ import annotations

import typer

from osd.cli.analyze.refusals import refusals
from osd.cli.analyze.scaling import scaling
from osd.cli.analyze.tokenizer import tokenizer
from osd.cli.offered import Group

app = typer.Typer(
    cls=Group,
    help="Look at traffic, vocabularies, refusals, and drafters that were not built yet.",
    no_args_is_help=True,
)
for command in (tokenizer, scaling, refusals):
    app.command()(command)
