"""``osd traces``: what was captured of requests, and how it is forgotten."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osd.cli.common import AsJson, ConfigFile, Overrides, fail, redis_url, settings_of

app = typer.Typer(help="Say what was captured, and forget it.", no_args_is_help=True)


@app.command(name="list")
def list_(as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Say of each domain how much is on its stream, and how much of it waits for a trainer and for how long."""
    settings = settings_of(config, overrides)
    url = redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, or set redis_url")
    from redis.exceptions import RedisError
    from rich.console import Console
    from rich.table import Table

    from osd.capture.streams import look
    from osd.redis_client import connect

    try:
        with connect(url, timeout=5.0) as client:
            states = look(client, settings.capture.stream)
    except RedisError as error:
        fail(f"Redis does not answer: {error}")
    table = Table("domain", "records", "MiB", "not learnt from", "oldest of these", box=None)
    for domain, state in states.items():
        lag, age = (None, None) if state.waiting is None else (state.waiting.records, state.waiting.age)
        if as_json:
            row = {"domain": domain, "records": state.records, "bytes": state.bytes, "lag": lag, "age": age}
            typer.echo(json.dumps(row))
            continue
        waits = "nobody learns" if lag is None else f"{lag:,}"
        oldest = f"{age:,.0f} s" if lag and age is not None else ""
        table.add_row(domain, f"{state.records:,}", f"{state.bytes / (1 << 20):,.1f}", waits, oldest)
    if not as_json:
        Console(highlight=False).print(table if states else "nothing has been captured")


@app.command()
def purge(
    request: Annotated[str, typer.Option(help="The id of the response, as in chatcmpl-...", metavar="ID")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Remove a request from the streams, from memory and from what is recalled, and name the versions that saw it."""
    settings = settings_of(config, overrides)
    from osd.admin import AdminError
    from osd.admin.audit import Actor
    from osd.admin.forgetting import forget

    try:
        found = forget(settings, redis_url(settings), Actor.local(), request)
    except AdminError as error:
        fail(error)
    typer.echo(
        f"{request}: {found.streamed} records removed from the streams, {found.remembered} from the memory of trainers"
    )
    typer.echo(f"{found.entries} entries that it may have touched dropped from what is recalled")
    typer.echo("checkpoints hold weights and no records")
    for domain in found.learning:
        typer.echo(f"the drafter in training of {domain} has learnt from it, and its next version will have")
    for domain, numbers in found.versions.items():
        typer.echo(f"versions of {domain} that have learnt from it: {', '.join(map(str, numbers))}")
    if not found.versions:
        typer.echo("no version has learnt from it")
