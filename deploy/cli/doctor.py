"""``osd doctor``: whether the loop can run here, and how well."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from osd.cli.common import BROKEN, AsJson, ConfigFile, Overrides, settings_of


def doctor(
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Look at packages, settings, CPU, GPU, memory, disk, Redis and port, and decode a tiny model.

    Starts nothing that stays, and ends with 1 where osd up would fail. The target itself is not looked at.
    """
    settings = settings_of(config, overrides)
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    colours = {"ok": "green", "warning": "yellow", "failure": "red"}
    failed = False
    with Console(stderr=True).status("importing ...") as status:
        from deploy.doctor.findings import findings

        status.update("looking ...")
        for found in findings(settings):
            failed |= found.state == "failure"
            if as_json:
                typer.echo(json.dumps(asdict(found)))
                continue
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_column(width=9)
            row.add_column(width=7)
            row.add_column(overflow="fold")
            row.add_row(found.check, f"[{colours[found.state]}]{found.state}[/]", escape(found.says))
            console.print(row)
    if failed:
        raise typer.Exit(BROKEN)
