"""``osd analyze scaling``: what measured drafters say of one that was not built yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.common import fail
from osd.cli.report import Json, Markdown, Svg, check_files, conclude


def scaling(
    files: Annotated[list[Path], typer.Argument(help="Points of osd bench scaling.", metavar="FILE...")],
    layers: Annotated[int | None, typer.Option(min=1, help="Of a drafter to predict.")] = None,
    parameters: Annotated[int | None, typer.Option(min=1, help="The same by its trained parameters.")] = None,
    traffic: Annotated[int | None, typer.Option(min=1, help="Completion tokens that it will be trained on.")] = None,
    json_file: Json = None,
    plot: Svg = None,
    markdown: Markdown = None,
) -> None:
    """Fit the drafter's loss to its size and traffic, and predict acceptance, speed and payback of one not built yet.

    The largest run and the largest drafter are predicted from the others first, beside what they are. Give --traffic
    with --layers or with --parameters for a prediction; it is refused a decade beyond what was measured, and for less
    traffic for each parameter than any point has.
    """
    check_files(json_file, plot, markdown)
    if layers is not None and parameters is not None:
        fail("--layers and --parameters say the same: give one of them")
    if (traffic is None) != (layers is None and parameters is None):
        fail("a prediction needs --traffic, and --layers or --parameters")
    from osd.analysis.scaling.forecast import Forecaster, largest
    from osd.analysis.scaling.points import ScalingError, read
    from osd.cli.analyze import scaling_tables as tables

    try:
        for file in files:
            if not file.is_file():
                raise ScalingError(f"there is no file {file}")
        found = [point for file in files for point in read(file)]
        forecaster, notes = Forecaster(found), list(tables.NOTES)
        shown, figures = [tables.law_table(forecaster)], tables.figures(forecaster)
        asked = []
        if traffic is not None:
            size = parameters if layers is None else forecaster.parameters_of(layers)
            assert size is not None  # noqa: S101 - one of them was given
            forecast = forecaster.predict(size, traffic)
            asked.append(tables.forecast_table(size, traffic, forecast))
            figures["forecast"] = tables.forecast_figures(size, traffic, forecast)
        for name, held in largest(found).items():
            try:
                shown.append(tables.held_out_table(name, *Forecaster.without(held, found)))
            except ScalingError as error:
                notes.append(f"Not predicted from the others: {name}, because {error}.")
    except ScalingError as error:
        fail(error)
    plots = [tables.plot(forecaster)]
    conclude([*shown, *asked], figures, json_file, plots=plots, plot=plot, notes=notes, markdown=markdown)
