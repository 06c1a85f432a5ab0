"""``osd audit``: who did what to drafters and traces."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from osd.cli.common import AsJson, ConfigFile, Overrides, fail, settings_of


def audit(
    last: Annotated[int, typer.Option(min=1, help="How many actions.")] = 20,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the last actions of operators: promote, rollback, pin, unpin, import and purge, and what came of them."""
    settings = settings_of(config, overrides)
    from osd.admin.audit import AuditLog

    try:
        entries = AuditLog(settings.home_dir).last(last)
    except OSError as error:
        fail(f"the audit log cannot be read: {error}")
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("time", "who", "from", "action", "about", "outcome")
    for entry in entries:
        about = [str(entry[name]) for name in ("domain", "version", "request") if name in entry]
        cells = [entry["time"], entry["who"], entry["from"], entry["action"], " ".join(about), entry["outcome"]]
        table.add_row(*map(Text, cells))
    if entries:
        Console(highlight=False).print(table)
    else:
        typer.echo(f"no action of an operator in {settings.home_dir}")
