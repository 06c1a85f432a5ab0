"""The commands of ``osd``, put together."""

from __future__ import annotations

import typer

from osd import __version__
from osd.cli import analyze, drafters, traces
from osd.cli.audit import audit
from osd.cli.chat import chat
from osd.cli.offered import Group
from osd.cli.replay import replay
from osd.cli.simulate import simulate
from osd.cli.tap import tap
from osd.cli.top import top

app = typer.Typer(
    name="osd",
    cls=Group,
    help="Speculative decoding whose drafter learns from live traffic. The output never changes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (replay, chat, tap, top, audit, simulate):
    app.command()(command)
app.add_typer(drafters.app, name="drafters")
app.add_typer(traces.app, name="traces")
app.add_typer(analyze.app, name="analyze")
app.add_typer(typer.Typer(cls=Group, help="Measure on this machine.", no_args_is_help=True), name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass
