"""Application of ``osd`` with all its commands."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osd import __version__
from osd.cli import analyze, drafters, traces
from osd.cli.client import chat, replay
from osd.cli.common import AsJson, ConfigFile, Domain, OnlyDomain, Overrides, fail, redis_url, settings_of
from osd.cli.exit_codes import INTERRUPTED
from osd.cli.offered import Group
from osd.cli.simulate import simulate
from osd.cli.top import top


def audit(
    last: Annotated[int, typer.Option(min=1, help="Number of actions to show.")] = 20,
    domain: OnlyDomain = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the last actions of operators (promote, rollback, pin, unpin, import and purge) and their results."""
    settings = settings_of(config, overrides, domain=domain)
    from osd.admin.audit import AuditLog

    try:
        entries = AuditLog(settings.home_dir).last(last, domain)
    except OSError as error:
        fail(f"the audit log cannot be read: {error}")
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    table.add_column("time", no_wrap=True)
    for name in ("who", "from", "action", "about", "outcome"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        subject = [str(entry[name]) for name in ("domain", "version", "request") if name in entry]
        cells = [entry["time"], entry["who"], entry["from"], entry["action"], " ".join(subject), entry["outcome"]]
        table.add_row(*map(Text, cells))
    if entries:
        Console(highlight=False).print(table)
    else:
        about = "" if domain is None else f" on {domain}"
        typer.echo(f"no action of an operator{about} in {settings.home_dir}")


def tap(
    upstream: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.", metavar="URL")],
    model: Annotated[
        str | None, typer.Option(help="Name of the target, if the upstream serves several models.")
    ] = None,
    same_tokenizer: Annotated[
        bool,
        typer.Option("--same-tokenizer", help="Confirm that an upstream without /tokenize has the target's tokenizer."),
    ] = False,
    domain: Domain = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Forward requests to an existing server, and capture requests and answers for osd learn."""
    settings = settings_of(config, overrides, domain=domain)
    redis = redis_url(settings)
    if redis is None:
        fail("osd tap needs the Redis of osd learn: set redis_url, or start osd learn first")
    from osd import logs
    from osd.config import ConfigError
    from osd.tap.agreement import AgreementError, agree
    from osd.tap.app import ListenError, Tap
    from osd.tap.upstream import AddressError, Upstream
    from osd.target.files import TargetError

    try:
        logs.set_up(settings.log, "tap")
        server = Upstream(upstream)
        served = agree(server, settings, model, same_tokenizer)
        running = Tap(settings, server, served, redis)
    except (AddressError, AgreementError, ConfigError, ListenError, TargetError) as error:
        fail(error)
    if served.warning:
        typer.echo(f"osd: {served.warning}", err=True)
    address = f"http://{settings.tap.host}"
    typer.echo(f"OpenAI API  {address}:{settings.tap.port}/v1, answered by {server.url}", err=True)
    typer.echo(f"Metrics     {address}:{settings.tap.metrics_port}/metrics\nCtrl-C stops the tap.", err=True)
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
app.add_typer(typer.Typer(cls=Group, help="Prepare vLLM as an engine.", no_args_is_help=True), name="vllm")


def _print_version(enabled: bool) -> None:
    if enabled:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
