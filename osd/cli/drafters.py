"""``osd drafters``: the versions of a domain's drafter, and which of them is in service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, settings_of

if TYPE_CHECKING:
    from osd.config import Settings

app = typer.Typer(help="List drafter versions, or go back to an earlier one.", no_args_is_help=True)


@app.command("list")
def list_versions(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show the versions of every domain."""
    settings = settings_of(config, overrides)
    from redis.exceptions import RedisError
    from rich.console import Console
    from rich.table import Table

    from osd.registry.pointer import Pointer
    from osd.registry.versions import Registry

    registry, url = Registry(settings.registry_dir), _redis_url(settings)
    table = Table("domain", "version", "in service", "parent", "made", "gate")
    for domain in registry.domains():
        stable = None
        if url:
            pointer = Pointer(url)
            try:
                rollout = pointer.get(domain)
                stable = rollout.stable if rollout else None
            except RedisError as error:
                fail(f"Redis does not answer: {error}")
            finally:
                pointer.close()
        for info in registry.list(domain):
            made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.manifest.get("created", 0)))
            row = [
                domain,
                str(info.number),
                "yes" if info.number == stable else "",
                str(info.manifest.get("parent") or ""),
            ]
            table.add_row(*row, made, info.problem or _figures(info.manifest.get("gate") or {}))
    if table.row_count:
        Console(highlight=False).print(table)
    else:
        typer.echo(f"no drafter version in {settings.registry_dir}")


@app.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="The version to go to; else the parent of the one in service.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Put an earlier version of the configured domain in service; replicas swap within a second."""
    settings = settings_of(config, overrides)
    from redis.exceptions import RedisError

    from osd.registry.events import Events
    from osd.registry.pointer import Pointer, Rollout
    from osd.registry.versions import Registry, VersionError

    url = _redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, or set redis_url")
    pointer, events, registry = Pointer(url), Events(url), Registry(settings.registry_dir)
    try:
        rollout = pointer.get(settings.domain)
        if rollout is None:
            fail(f"domain {settings.domain} has no version in service; set domain")
        number = (
            version if version is not None else registry.load(settings.domain, rollout.stable).manifest.get("parent")
        )
        if number is None:
            fail(f"version {rollout.stable} of {settings.domain} has no parent; name the version to go to")
        registry.load(settings.domain, number)
        pointer.set(settings.domain, Rollout(stable=number, canary=None, share=0.0, changed=time.time()))
        events.add("rolled_back", settings.domain, number, previous=rollout.stable)
    except (RedisError, VersionError) as error:
        fail(error)
    finally:
        pointer.close()
        events.close()
    typer.echo(f"{settings.domain}: version {number} is in service, before it {rollout.stable}")


def _redis_url(settings: Settings) -> str | None:
    from deploy.running import find

    running = find(settings.home_dir)
    return running.redis_url if running else settings.redis_url


def _figures(gate: dict) -> str:
    numbers = ((name, value) for name, value in gate.items() if isinstance(value, float))
    return ", ".join(f"{name} {value:.3f}" for name, value in numbers)
