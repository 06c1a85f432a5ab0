"""Commands ``osd traces``: list captured traces and delete a request."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.common import (
    AsJson,
    ConfigFile,
    OnlyDomain,
    Overrides,
    fail,
    fail_action,
    redis_errors,
    redis_url,
    settings_of,
)

app = typer.Typer(help="List captured traces, and delete a request.", no_args_is_help=True)


@app.command(name="list")
def list_(
    domain: OnlyDomain = None, as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None
) -> None:
    """Show the size of each domain's stream, and the records that no trainer has read yet."""
    settings = settings_of(config, overrides, domain=domain)
    url = redis_url(settings)
    if url is None:
        fail(f"no service runs in {settings.home_dir}; start it with osd up, or set redis_url")
    from rich.console import Console
    from rich.table import Table

    from osd.capture.streams import stream_states
    from osd.redis_client import connect

    with redis_errors(), connect(url, timeout=5.0) as client:
        states = {
            name: state
            for name, state in stream_states(client, settings.capture.stream).items()
            if domain in (None, name)
        }
    table = Table("domain", "records", "MiB", "waiting", "oldest waiting", box=None)
    for name, state in states.items():
        lag, age = (None, None) if state.waiting is None else (state.waiting.records, state.waiting.age)
        if as_json:
            row = {"domain": name, "records": state.records, "bytes": state.bytes, "lag": lag, "age": age}
            typer.echo(json.dumps(row))
            continue
        waits = "no trainer" if lag is None else f"{lag:,}"
        oldest = f"{age:,.0f} s" if lag and age is not None else ""
        table.add_row(name, f"{state.records:,}", f"{state.bytes / (1 << 20):,.1f}", waits, oldest)
    if not as_json:
        about = "" if domain is None else f" of {domain}"
        Console(highlight=False).print(table if states else f"nothing has been captured{about}")


@app.command()
def purge(
    request: Annotated[str, typer.Option(help="Id of the response, for example chatcmpl-...", metavar="ID")],
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Delete a request from streams, trainers and recall, and list the versions that learned from it."""
    settings = settings_of(config, overrides)
    from osd.admin import AdminError
    from osd.admin.audit import Actor
    from osd.admin.purging import purge_request

    try:
        removed = purge_request(settings, redis_url(settings), Actor.local(), request)
    except AdminError as error:
        fail_action(error)
    if as_json:
        typer.echo(json.dumps({"request": request, **asdict(removed)}))
        return
    if not removed.is_known:
        typer.echo(f"no record of {request} was found: check the id")
    records = f"{removed.streamed} record{'s' * (removed.streamed != 1)} removed from the streams"
    typer.echo(f"{request}: {records}, {removed.remembered} from the memory of trainers")
    typer.echo(f"{removed.entries} entries that may contain it removed from recall; they may be of other requests")
    for domain in removed.learning:
        typer.echo(f"the drafter in training of {domain} has learned from it, and so will its next version")
    for domain, numbers in removed.versions.items():
        typer.echo(f"versions of {domain} that have learned from it: {', '.join(map(str, numbers))}")
    if not removed.versions:
        typer.echo("no version has learned from it")
    for member in removed.absent:
        typer.echo(f"the {member} is absent and has not answered; it forgets the request when it returns")
