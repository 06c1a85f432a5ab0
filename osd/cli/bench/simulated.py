"""``osd bench simulated``: a simulation beside what it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Json
from osd.cli.bench.recorded import Markdown, check_files, conclude
from osd.cli.common import fail


def simulated(
    passes: Annotated[Path, typer.Argument(help="Folder of osd bench net: passes/... of the home.", metavar="PASSES")],
    fitted: Annotated[
        float | None,
        typer.Option("--fit", min=0.05, max=1, help="Load whose passes say how drafts do; else the least."),
    ] = None,
    json_file: Json = None,
    markdown: Markdown = None,
) -> None:
    """Simulate stored passes of the service, and print what was predicted over what was observed.

    How drafts do on that traffic is fitted to the first turn of one load, and everything else is predicted: with it the
    speeds, bytes and paybacks of that turn too.
    """
    check_files(json_file, None, markdown)
    from benchmarks.adaptation.simulated import PassesError, Stored, compare
    from benchmarks.adaptation.simulated_tables import compared_table, fitted_table

    try:
        fit, found = compare(Stored.read(passes), fitted)
    except PassesError as error:
        fail(error)
    figures = {"fitted": vars(fit), "passes": [one.figures() for one in found]}
    conclude([fitted_table(fit), compared_table(found)], [], [], figures, (json_file, None, markdown))
