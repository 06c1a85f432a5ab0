"""``osd traces``: what was captured of requests, and how it is forgotten."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of

app = typer.Typer(help="Forget what was captured of a request.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def purge(
    request: Annotated[str, typer.Option(help="The id of the response, as in chatcmpl-...", metavar="ID")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Remove a request from the stream, from memory and from what is recalled, and name the versions that saw it."""
    settings = settings_of(config, overrides)
    from osd.admin.audit import Actor
    from osd.admin.errors import AdminError
    from osd.admin.forgetting import forget

    try:
        found = forget(settings, redis_url(settings), Actor.local(), request)
    except AdminError as error:
        fail(error)
    typer.echo(
        f"{request}: {found.streamed} records removed from the stream, {found.remembered} from the memory of trainers"
    )
    typer.echo(f"{found.entries} entries that it may have touched dropped from what is recalled")
    typer.echo("checkpoints hold weights and no records")
    for domain in found.learning:
        typer.echo(f"the drafter in training of {domain} has learnt from it, and its next version will have")
    for domain, numbers in found.versions.items():
        typer.echo(f"versions of {domain} that have learnt from it: {', '.join(map(str, numbers))}")
    if not found.versions:
        typer.echo("no version has learnt from it")
