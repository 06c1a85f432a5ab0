"""Command ``osd analyze scaling``: predict a drafter from measured drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.common import AsJson, fail
from osd.cli.report import Markdown, ReportFile, Svg, check_files, conclude


def scaling(
    files: Annotated[list[Path], typer.Argument(help="Files of osd bench scaling.", metavar="FILE...")],
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the drafter to predict.")] = None,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Trained parameters of the drafter to predict, instead of --layers.")
    ] = None,
    traffic: Annotated[int | None, typer.Option(min=1, help="Completion tokens for its training.")] = None,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    plot: Svg = None,
    markdown: Markdown = None,
) -> None:
    """Fit a scaling law to measured drafters, and predict acceptance, speed and payback of a new drafter.

    The largest run and the largest drafter are first predicted from the other points and compared with their
    measurements. For a prediction, give --traffic with --layers or --parameters. It must lie within a factor of ten of
    the measured sizes and amounts of traffic, with at least as much traffic per parameter as some point.
    """
    check_files(json_file, plot, markdown)
    if layers is not None and parameters is not None:
        fail("--layers and --parameters both set the size: give only one")
    if (traffic is None) != (layers is None and parameters is None):
        fail("a prediction needs --traffic, and --layers or --parameters")
    from osd.analysis.scaling.forecast import Forecaster, largest
    from osd.analysis.scaling.points import ScalingError, read
    from osd.cli.analyze import scaling_tables as tables

    try:
        for file in files:
            if not file.is_file():
                raise ScalingError(f"there is no file {file}")
        points = [point for file in files for point in read(file)]
        forecaster, notes = Forecaster(points), list(tables.NOTES)
        shown, figures = [tables.law_table(forecaster)], tables.figures(forecaster)
        predicted = []
        if traffic is not None:
            size = parameters if layers is None else forecaster.parameters_of(layers)
            assert size is not None  # noqa: S101 - checked above
            forecast = forecaster.predict(size, traffic)
            predicted.append(tables.forecast_table(size, traffic, forecast))
            figures["forecast"] = tables.forecast_figures(size, traffic, forecast)
        for name, held_out in largest(points).items():
            try:
                shown.append(tables.held_out_table(name, *Forecaster.without(held_out, points)))
            except ScalingError as error:
                notes.append(f"Not predicted from the other points: {name}, because {error}.")
    except ScalingError as error:
        fail(error)
    plots = [tables.plot(forecaster)]
    tables_shown = [*shown, *predicted]
    conclude(tables_shown, figures, json_file, plots=plots, plot=plot, notes=notes, markdown=markdown, as_json=as_json)
