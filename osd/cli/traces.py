"""``osd traces``: what was captured of requests, and how it is forgotten."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of

if TYPE_CHECKING:
    from osd.capture.purge import Member, Removed
    from osd.config import Settings

app = typer.Typer(help="Forget what was captured of a request.", no_args_is_help=True)

_ANSWER_SECONDS = 60.0


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
    from redis.exceptions import RedisError

    from osd.drafters.recall.snapshot import Snapshots
    from osd.registry.learnt import versions_with
    from osd.registry.versions import Registry

    url = redis_url(settings)
    streamed, answers, silent = 0, {}, set()
    if url is not None:
        try:
            streamed, answers, silent = _forget(settings, url, request)
        except RedisError as error:
            fail(f"Redis does not answer, the request may not be removed: {error}")
    try:
        entries = Snapshots(settings.registry_dir).purge(request)
    except OSError as error:
        fail(f"the snapshots of what is recalled cannot be written, the request may not be removed: {error}")
    entries += sum(removed.entries for removed in answers.values())
    registry = Registry(settings.registry_dir)
    versions = {domain: versions_with(registry, domain, request) for domain in registry.domains()}
    versions = {domain: numbers for domain, numbers in versions.items() if numbers}
    remembered = sum(removed.records for removed in answers.values())
    learning = sorted(member.name for member, removed in answers.items() if removed.learnt)
    if silent:
        names = " and ".join(f"the {role} {name}" for role, name in sorted(silent))
        fail(f"{names} did not answer, and will forget request {request} as soon as it can; ask again")
    if not (streamed or remembered or learning or versions or entries):
        fail(f"there is no request {request} in the stream, in a trainer's memory or in what a version learnt from")
    typer.echo(f"{request}: {streamed} records removed from the stream, {remembered} from the memory of trainers")
    typer.echo(f"{entries} entries that it may have touched dropped from what is recalled")
    typer.echo("checkpoints hold weights and no records")
    for domain in learning:
        typer.echo(f"the drafter in training of {domain} has learnt from it, and its next version will have")
    for domain, numbers in versions.items():
        typer.echo(f"versions of {domain} that have learnt from it: {', '.join(map(str, numbers))}")
    if not versions:
        typer.echo("no version has learnt from it")


def _forget(settings: Settings, url: str, request: str) -> tuple[int, dict[Member, Removed], set[Member]]:
    """Records removed from the stream, what each member removed, and those that do not answer."""
    from osd.capture.purge import Purges
    from osd.capture.retention import Retention
    from osd.redis_client import connect

    client, purges = connect(url, timeout=5.0), Purges(url)
    try:
        retention = Retention(client, settings.capture)
        purges.ask(request)  # first, so that nothing of it is taken in from here on
        streamed = retention.purge(request)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing := purges.members() - purges.answers(request).keys():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        streamed += retention.purge(request)  # what was on its way
        return streamed, purges.answers(request), missing
    finally:
        purges.close()
        client.close()
