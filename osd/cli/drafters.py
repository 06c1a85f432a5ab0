"""Commands ``osd drafters``: list, move, export and import drafter versions."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import (
    AsJson,
    ConfigFile,
    Domain,
    OnlyDomain,
    Overrides,
    fail,
    fail_action,
    redis_url,
    settings_of,
)
from osd.cli.offered import Group
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from osd.admin.audit import Actor
    from osd.admin.rollouts import RolloutMove, Rollouts

app = typer.Typer(cls=Group, help="List drafter versions, and choose the version in service.", no_args_is_help=True)


class FormatName(StrEnum):
    """Values of ``--format``, copied from ``osd.drafting.formats``, which imports torch."""

    speculators = "speculators"
    transformers = "transformers"
    medusa = "medusa"


@app.command("list")
def list_versions(
    domain: OnlyDomain = None, as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None
) -> None:
    """Show the versions of every domain, and the versions that were removed last.

    Accepted and length are the acceptance rate and the tokens per decoding step that the gate measured, for the
    previous version and for this version. Cost is the training that led to a version, in core seconds. Measured is the
    speed-up over the previous version while it is in service or on trial. Trainer is the state of the domain's trainer,
    and the reason while it does not train.
    """
    settings = settings_of(config, overrides, domain=domain)
    from rich.console import Console

    from osd.admin import AdminError
    from osd.admin.rollouts import listings
    from osd.cli.version_table import version_records, version_table

    try:
        domains = [item for item in listings(settings, redis_url(settings)) if domain in (None, item.domain)]
    except AdminError as error:
        fail_action(error)
    console = Console(highlight=False)
    for listing in domains:
        if as_json:
            for record in version_records(listing):
                typer.echo(json.dumps(record))
        else:
            console.print(version_table(listing))
    if not domains and not as_json:
        about = "" if domain is None else f" of {domain}"
        typer.echo(f"no drafter version{about} in {settings.registry.url or settings.registry_dir}")


@app.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="Version to return to; by default the parent of the version in service.")
    ] = None,
    domain: Domain = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Put an earlier version of the domain in service and end its canary.

    Replicas follow within a second. The trainer may put newer versions in service later, unless the domain is pinned.
    """
    with _rollouts(config, overrides, domain) as (rollouts, actor, name):
        moved = rollouts.rollback(actor, name, version)
    kept = (
        "it stays pinned" if moved.pinned else f"the trainer may replace it; osd drafters pin {moved.version} keeps it"
    )
    sentence = f"version {moved.version} is in service; the previous version was {moved.previous}; {kept}"
    _print_move(moved, as_json, sentence)


@app.command()
def promote(
    domain: Domain = None, as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None
) -> None:
    """Put the canary of the domain in service for all requests."""
    with _rollouts(config, overrides, domain) as (rollouts, actor, name):
        moved = rollouts.promote(actor, name)
    _print_move(moved, as_json, f"version {moved.version} is in service; the previous version was {moved.previous}")


@app.command()
def pin(
    version: Annotated[
        int | None, typer.Argument(help="Version to keep in service; by default the version in service.")
    ] = None,
    domain: Domain = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Keep a version of the domain in service, without canaries and new versions, until unpin."""
    with _rollouts(config, overrides, domain) as (rollouts, actor, name):
        moved = rollouts.pin(actor, name, version)
    _print_move(moved, as_json, f"version {moved.version} stays in service until osd drafters unpin")


@app.command()
def unpin(
    domain: Domain = None, as_json: AsJson = False, config: ConfigFile = None, overrides: Overrides = None
) -> None:
    """Allow the trainer to put new versions of the domain in service again."""
    with _rollouts(config, overrides, domain) as (rollouts, actor, name):
        moved = rollouts.unpin(actor, name)
    _print_move(moved, as_json, f"version {moved.version} is in service, and the trainer may replace it")


@app.command("export")
def export_version(
    version: Annotated[int, typer.Argument(min=1, help="Version of the domain.")],
    format: Annotated[FormatName, typer.Option(help="speculators (eagle), transformers (language_model) or medusa.")],
    out: Annotated[Path, typer.Option(help="New directory for the export.", metavar="DIR")],
    domain: Domain = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Write a version in a format that vLLM, transformers or Medusa's code can load.

    Prints the vLLM command for it, or the reason why vLLM cannot load it.
    """
    settings = settings_of(config, overrides, domain=domain)
    from osd.admin.exporting import EXPORT_ERRORS, export

    _hide_progress_bars()
    try:
        exported = export(settings, version, format.value, out)
    except EXPORT_ERRORS as error:
        fail(error)
    if as_json:
        record = {"domain": settings.domain, "version": version, "directory": str(out), **asdict(exported)}
        typer.echo(json.dumps(record))
        return
    typer.echo(f"version {version} of {settings.domain} is in {out}, for the target {exported.target}")
    if exported.speculative is None:
        typer.echo(f"osd: {exported.problem}", err=True)
    else:
        typer.echo(f"vllm serve {exported.target} --speculative-config '{json.dumps(exported.speculative)}'")
        typer.echo(
            f"to load later versions, set OSD_VLLM_REGISTRY={settings.registry.url or settings.registry_dir} and add "
            "--worker-extension-cls osd.vllm.worker.Osd --middleware osd.vllm.middleware.OsdMiddleware"
        )


@app.command("follow")
def follow_versions(
    format: Annotated[FormatName, typer.Option(help="speculators (eagle), transformers (language_model) or medusa.")],
    out: Annotated[
        Path, typer.Option(help="Directory for the exports; each version gets a subdirectory.", metavar="DIR")
    ],
    run: Annotated[
        str,
        typer.Option(help="Command that restarts the servers; the directory is its last argument.", metavar="COMMAND"),
    ],
    domain: Domain = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Export each version that becomes stable and run a command with its directory, until Ctrl-C.

    Use it for servers that cannot load draft weights while they run. The command should restart one server at a time.
    """
    settings = settings_of(config, overrides, domain=domain)
    import shlex
    import time

    from osd.admin.exporting import StableExports

    try:
        command = shlex.split(run)
    except ValueError as error:
        fail(f"--run is not a valid command: {error}")
    if not command:
        fail("--run must be a command")
    _hide_progress_bars()
    exports = StableExports(settings, format.value, out, command, lambda message: typer.echo(message, err=True))
    with stop_signals():
        while True:
            exports.look()
            time.sleep(1)


@app.command("import")
def import_drafter(
    directory: Annotated[
        Path, typer.Argument(help="Directory with config.json and weights in safetensors.", metavar="DIR")
    ],
    domain: Domain = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Add a drafter that was trained elsewhere as the next version of the domain."""
    settings = settings_of(config, overrides, domain=domain)
    from osd import drafting
    from osd.admin import AdminError
    from osd.admin.audit import Actor, AuditLog
    from osd.drafting import formats
    from osd.registry.object_storage import storage_of
    from osd.registry.pointer_file import PointerFiles
    from osd.registry.retention import retire
    from osd.registry.versions import Registry, VersionError
    from osd.target.files import TargetError
    from osd.target.load import target_directory

    _hide_progress_bars()
    try:
        target = target_directory(settings, runs_here=False)
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
    if as_json:
        typer.echo(json.dumps({"domain": settings.domain, "version": number}))
        return
    typer.echo(
        f"{directory} is version {number} of {settings.domain}; put it in service: osd drafters rollback {number}"
        + ("" if domain is None else f" --domain {domain}")
    )


@contextmanager
def _rollouts(config: ConfigFile, overrides: Overrides, domain: str | None) -> Generator[tuple[Rollouts, Actor, str]]:
    """Yield the rollouts, the operator and the domain; exit with a line on an ``AdminError``."""
    settings = settings_of(config, overrides, domain=domain)
    from osd.admin import AdminError
    from osd.admin.audit import Actor
    from osd.admin.rollouts import Rollouts

    url = redis_url(settings)
    if url is None:
        fail(f"no service runs in {settings.home_dir}; start it with osd up, or set redis_url")
    rollouts = Rollouts(settings, url)
    try:
        yield rollouts, Actor.local(), settings.domain
    except AdminError as error:
        fail_action(error)
    finally:
        rollouts.close()


def _print_move(moved: RolloutMove, as_json: bool, sentence: str) -> None:
    """Print the new state of a domain as JSON, or in a sentence."""
    typer.echo(json.dumps(asdict(moved)) if as_json else f"{moved.domain}: {sentence}")


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
