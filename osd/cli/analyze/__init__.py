"""Commands ``osd analyze``: reports on traffic, vocabularies, refusals and drafters."""

from __future__ import annotations

import typer

from osd.cli.analyze.refusals import refusals
from osd.cli.analyze.scaling import scaling
from osd.cli.analyze.tokenizer import tokenizer
from osd.cli.offered import Group

app = typer.Typer(
    cls=Group,
    help="Analyze traffic, vocabularies and refusals, and predict drafters before they are trained.",
    no_args_is_help=True,
)
for command in (tokenizer, scaling, refusals):
    app.command()(command)
