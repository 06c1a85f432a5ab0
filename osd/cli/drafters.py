"""``osd drafters``: the versions of a domain's drafter, and which of them is in service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from osd.cli import exchange, rollout
from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of

if TYPE_CHECKING:
    from osd.registry.pointer import Rollout

app = typer.Typer(help="List drafter versions, and say which of them is in service.", no_args_is_help=True)


@app.command("list")
def list_versions(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Show the versions of every domain."""
    settings = settings_of(config, overrides)
    from redis.exceptions import RedisError
    from rich.console import Console
    from rich.table import Table

    from osd.registry.pointer import Pointer
    from osd.registry.versions import Registry

    registry, url = Registry(settings.registry_dir), redis_url(settings)
    table = Table("domain", "version", "in service", "parent", "made", "gate")
    for domain in registry.domains():
        moved = None
        if url:
            try:
                with Pointer(url) as pointer:
                    moved = pointer.get(domain)
            except RedisError as error:
                fail(f"Redis does not answer: {error}")
        for info in registry.list(domain):
            made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.manifest.get("created", 0)))
            row = [
                domain,
                str(info.number),
                _state(info.number, moved),
                str(info.manifest.get("parent") or ""),
            ]
            table.add_row(*row, made, info.problem or _figures(info.manifest.get("gate") or {}))
    if table.row_count:
        Console(highlight=False).print(table)
    else:
        typer.echo(f"no drafter version in {settings.registry_dir}")


for _command in (rollout.rollback, rollout.promote, rollout.pin, rollout.unpin):
    app.command()(_command)
app.command("export")(exchange.export_version)
app.command("import")(exchange.import_drafter)


def _state(number: int, rollout: Rollout | None) -> str:
    if rollout is None:
        return ""
    if number == rollout.canary:
        return f"canary, {100 * rollout.share:.0f} %"
    if number != rollout.stable:
        return ""
    return "yes, pinned" if rollout.pinned else "yes"


def _figures(gate: dict) -> str:
    numbers = ((name, value) for name, value in gate.items() if isinstance(value, float))
    return ", ".join(f"{name} {value:.3f}" for name, value in numbers)
