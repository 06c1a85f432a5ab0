"""The commands of ``osd``, put together, and those of one function."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osd import __version__
from osd.cli import analyze, drafters, traces
from osd.cli.client import chat, replay
from osd.cli.common import AsJson, ConfigFile, Overrides, fail, redis_url, settings_of
from osd.cli.offered import Group
from osd.cli.signals import INTERRUPTED
from osd.cli.simulate import simulate
from osd.cli.top import top


def audit(
    last: Annotated[int, typer.Option(min=1, help="How many actions.")] = 20,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the last actions of operators: promote, rollback, pin, unpin, import and purge, and what came of them."""
    settings = settings_of(config, overrides)
    from osd.admin.audit import AuditLog

    try:
        entries = AuditLog(settings.home_dir).last(last)
    except OSError as error:
        fail(f"the audit log cannot be read: {error}")
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("time", "who", "from", "action", "about", "outcome")
    for entry in entries:
        about = [str(entry[name]) for name in ("domain", "version", "request") if name in entry]
        cells = [entry["time"], entry["who"], entry["from"], entry["action"], " ".join(about), entry["outcome"]]
        table.add_row(*map(Text, cells))
    if entries:
        Console(highlight=False).print(table)
    else:
        typer.echo(f"no action of an operator in {settings.home_dir}")


def tap(
    upstream: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.", metavar="URL")],
    model: Annotated[
        str | None, typer.Option(help="Which of the upstream's models is the target, where it serves several.")
    ] = None,
    same_tokenizer: Annotated[
        bool, typer.Option("--same-tokenizer", help="The upstream tells no tokenizer, and it is the target's.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Pass requests on to a server that stays, answers back, and capture both for osd learn."""
    settings = settings_of(config, overrides)
    redis = redis_url(settings)
    if redis is None:
        fail("osd tap needs a Redis that osd learn reads too: set redis_url, or start osd learn first")
    from osd import logs
    from osd.config import ConfigError
    from osd.tap.agreement import AgreementError, agree
    from osd.tap.app import ListenError, Tap
    from osd.tap.upstream import AddressError, Upstream
    from osd.target.load import TargetError

    try:
        logs.set_up(settings.log, "tap")
        behind = Upstream(upstream)
        served = agree(behind, settings, model, same_tokenizer)
        running = Tap(settings, behind, served, redis)
    except (AddressError, AgreementError, ConfigError, ListenError, TargetError) as error:
        fail(error)
    if served.warning:
        typer.echo(f"osd: {served.warning}", err=True)
    place = f"http://{settings.tap.host}"
    typer.echo(f"OpenAI API  {place}:{settings.tap.port}/v1, answered by {behind.url}", err=True)
    typer.echo(f"Metrics     {place}:{settings.tap.metrics_port}/metrics\nCtrl-C stops the tap.", err=True)
    running.run()
    raise typer.Exit(INTERRUPTED)


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
