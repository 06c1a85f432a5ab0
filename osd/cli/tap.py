"""``osd tap``: a proxy in front of another server, which captures what passes."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of
from osd.cli.signals import INTERRUPTED


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
