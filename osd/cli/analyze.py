"""``osd analyze``: what captured traffic says, and what follows from measured drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Contexts, Depth, Draft, Drafts, Json, Plot, Prompts, Temperatures, TopP, check_output
from osd.cli.bench.recorded import Markdown, check_files
from osd.cli.bench.recorded import conclude as conclude_tables
from osd.cli.bench.rules import compare, conclude
from osd.cli.common import ConfigFile, Overrides, fail, settings_of

app = typer.Typer(help="Look at what was captured or measured.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command("drafts")
def analyze_drafts(
    live: Annotated[bool, typer.Option("--live", help="From live models instead of captured traces.")] = False,
    records: Annotated[int, typer.Option(min=1, help="Newest traces to read.")] = 64,
    places: Annotated[int, typer.Option(min=2, help="Drafted places of them to look at.")] = 2048,
    drafts: Drafts = 3,
    depth: Depth = 3,
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    temperature: Temperatures = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    contexts: Contexts = 32,
    json_file: Json = None,
    plot: Plot = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Say of each verification rule how much it accepts of the traffic's drafts, next to the best possible.

    Ends with 1 when a rule surpasses what is possible. With --live this is osd bench rules, whose options it takes;
    without it, of those only --drafts, --json and --plot.
    """
    settings = settings_of(config, overrides)
    if live:
        from benchmarks.rules import Plan

        return compare(settings, Plan(drafts, depth, contexts), draft, prompts, temperature, top_p, json_file, plot)
    check_output(json_file, plot)
    from deploy.running import find

    running = find(settings.home_dir)
    url = running.redis_url if running else settings.redis_url
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, set redis_url, or ask for --live")
    from benchmarks import traces
    from benchmarks.pair import BenchError

    try:
        found = traces.places_of(traces.newest(url, settings.capture.stream, records), places)
    except BenchError as error:
        fail(error)
    table = traces.compare(found, drafts)
    typer.echo(traces.NOTE)
    typer.echo(
        f"{found.records} traces; the tokens that both models list carry {found.listed:.3f} of the target's mass; "
        f"in service {found.accepted:.3f} of the drafted tokens were accepted"
    )
    conclude([table], {"stream": settings.capture.stream, "note": traces.NOTE, "listed": found.listed}, json_file, plot)


@app.command("scaling")
def analyze_scaling(
    files: Annotated[list[Path], typer.Argument(help="Points of osd bench scaling.", metavar="FILE...")],
    layers: Annotated[int | None, typer.Option(min=1, help="Of a drafter to predict.")] = None,
    parameters: Annotated[int | None, typer.Option(min=1, help="The same by its trained parameters.")] = None,
    traffic: Annotated[int | None, typer.Option(min=1, help="Completion tokens that it will be trained on.")] = None,
    json_file: Json = None,
    plot: Plot = None,
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
    from benchmarks.adaptation import scaling_tables as tables
    from osd.analysis.scaling.forecast import Forecaster, largest
    from osd.analysis.scaling.points import ScalingError, read

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
    conclude_tables([*shown, *asked], [tables.plot(forecaster)], notes, figures, (json_file, plot, markdown))
