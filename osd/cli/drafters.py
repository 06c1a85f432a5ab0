"""``osd drafters``: the versions of a domain's drafter, which of them is in service, and those of other libraries."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import AsJson, ConfigFile, Overrides, fail, redis_url, settings_of
from osd.cli.offered import Group
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from osd.admin.audit import Actor
    from osd.admin.rollouts import Rollouts

app = typer.Typer(cls=Group, help="List drafter versions, and say which of them is in service.", no_args_is_help=True)


class FormatName(StrEnum):
    """What ``--format`` may be; ``osd.drafting.formats`` has them, and needs torch."""

    speculators = "speculators"
    transformers = "transformers"
    medusa = "medusa"


@app.command("list")
def list_versions(as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show the versions of every domain, and those that were removed last.

    Accepted and length: the share of draft tokens that the gate saw kept, and tokens a round, by the version before and
    by this one. Cost: core seconds of training that led to a version. Measured: its speed-up over the version before,
    while it is in service or on trial.
    """
    settings = settings_of(config, overrides)
    from rich.console import Console

    from osd.admin import AdminError
    from osd.admin.rollouts import listings
    from osd.cli.version_table import version_records, version_table

    try:
        found = listings(settings, redis_url(settings))
    except AdminError as error:
        fail(error)
    console = Console(highlight=False)
    for listing in found:
        if as_json:
            for record in version_records(listing):
                typer.echo(json.dumps(record))
        else:
            console.print(version_table(listing))
    if not found and not as_json:
        typer.echo(f"no drafter version in {settings.registry.url or settings.registry_dir}")


@app.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="The version to go to; else the parent of the one in service.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Put an earlier version of the configured domain in service and end its canary; replicas swap within a second."""
    with _rollouts(config, overrides) as (rollouts, actor, domain):
        moved = rollouts.rollback(actor, domain, version)
    typer.echo(f"{domain}: version {moved.version} is in service, before it {moved.previous}")


@app.command()
def promote(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """End the trial of the configured domain's canary: it serves every request from now on."""
    with _rollouts(config, overrides) as (rollouts, actor, domain):
        moved = rollouts.promote(actor, domain)
    typer.echo(f"{domain}: version {moved.version} is in service, before it {moved.previous}")


@app.command()
def pin(
    version: Annotated[int | None, typer.Argument(help="The version to keep in service; else the one that is.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Keep one version of the configured domain in service: no canary, and no candidate of the trainer, until unpin."""
    with _rollouts(config, overrides) as (rollouts, actor, domain):
        moved = rollouts.pin(actor, domain, version)
    typer.echo(f"{domain}: version {moved.version} stays in service until osd drafters unpin")


@app.command()
def unpin(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Let the trainer put new versions of the configured domain in service again."""
    with _rollouts(config, overrides) as (rollouts, actor, domain):
        moved = rollouts.unpin(actor, domain)
    typer.echo(f"{domain}: version {moved.version} is in service, and the trainer may replace it")


@app.command("export")
def export_version(
    version: Annotated[int, typer.Argument(min=1, help="The version of the configured domain.")],
    format: Annotated[FormatName, typer.Option(help="speculators (eagle), transformers (language_model) or medusa.")],
    out: Annotated[Path, typer.Option(help="A directory that is not there yet.", metavar="DIR")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Write a version so that vLLM, transformers or other users of Medusa's heads can load it.

    Says how vLLM is to be started with it, or why vLLM does not load it.
    """
    settings = settings_of(config, overrides)
    from osd.admin.exporting import EXPORT_ERRORS, export

    _quiet()
    try:
        exported = export(settings, version, format.value, out)
    except EXPORT_ERRORS as error:
        fail(error)
    typer.echo(f"version {version} of {settings.domain} is in {out}, for the target {exported.target}")
    if exported.speculative is None:
        typer.echo(f"osd: {exported.problem}", err=True)
    else:
        typer.echo(f"vllm serve {exported.target} --speculative-config '{json.dumps(exported.speculative)}'")


@app.command("follow")
def follow_versions(
    format: Annotated[FormatName, typer.Option(help="speculators (eagle), transformers (language_model) or medusa.")],
    out: Annotated[Path, typer.Option(help="Below it each version has a directory.", metavar="DIR")],
    run: Annotated[
        str, typer.Option(help="What restarts the servers; the directory is added to it.", metavar="COMMAND")
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Export each version that becomes stable and run a command with its directory, until Ctrl-C.

    For servers that load no draft weights while they run; the command is to restart one after the other.
    """
    settings = settings_of(config, overrides)
    import shlex
    import time

    from osd.admin.exporting import StableExports

    try:
        command = shlex.split(run)
    except ValueError as error:
        fail(f"--run is no command: {error}")
    if not command:
        fail("--run must be a command")
    _quiet()
    following = StableExports(settings, format.value, out, command, lambda said: typer.echo(said, err=True))
    with stop_signals():
        while True:
            following.look()
            time.sleep(1)


@app.command("import")
def import_drafter(
    directory: Annotated[Path, typer.Argument(help="Holds config.json and weights in safetensors.", metavar="DIR")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Take a drafter that was trained elsewhere as the next version of the configured domain."""
    settings = settings_of(config, overrides)
    from osd import drafting
    from osd.admin import AdminError
    from osd.admin.audit import Actor, AuditLog
    from osd.drafting import formats
    from osd.registry.object_storage import storage_of
    from osd.registry.pointer_file import PointerFiles
    from osd.registry.retention import retire
    from osd.registry.versions import Registry, VersionError
    from osd.target.load import TargetError, target_directory

    _quiet()
    try:
        target = target_directory(settings)
        name, drafter = formats.read(directory.absolute(), target)
        manifest = {"parent": None, "trained_on": {}, "imported": {"format": name, "directory": directory.name}}
        registry, audit = Registry(storage_of(settings)), AuditLog(settings.home_dir)
        with audit.action(Actor.local(), "import", domain=settings.domain) as entry:
            number = registry.publish(settings.domain, drafter.weights(), drafter.config(), manifest)
            entry["version"] = number
        guard = PointerFiles(registry.storage).locked(settings.domain)
        retire(registry, settings.domain, settings.registry.keep, guard)
    except (VersionError, TargetError, drafting.DrafterError, formats.FormatError, AdminError, OSError) as error:
        fail(error)
    typer.echo(
        f"{directory} is version {number} of {settings.domain}; put it in service: osd drafters rollback {number}"
    )


@contextmanager
def _rollouts(config: ConfigFile, overrides: Overrides) -> Generator[tuple[Rollouts, Actor, str]]:
    """What moves the configured domain, and who does."""
    settings = settings_of(config, overrides)
    from osd.admin import AdminError
    from osd.admin.audit import Actor
    from osd.admin.rollouts import Rollouts

    url = redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, or set redis_url")
    rollouts = Rollouts(settings, url)
    try:
        yield rollouts, Actor.local(), settings.domain
    except AdminError as error:
        fail(error)
    finally:
        rollouts.close()


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
