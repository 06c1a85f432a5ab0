"""Command ``osd simulate``: storage, training, savings and cost of a simulated deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osd.cli.common import AsJson, ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Markdown, ReportFile, Svg, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.config import ConfigError, load_scenario


def simulate(
    scenario_file: Annotated[
        Path | None,
        typer.Option("--scenario", help="YAML file with assumptions: docs/scale.md.", metavar="FILE"),
    ] = None,
    assumed: Annotated[
        list[str] | None,
        typer.Option("--assume", help="Assumption, such as domains.count=20; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Find the number of trainers and the capture budget with the largest net gain."),
    ] = False,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    plot: Svg = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Simulate serving.replicas replicas under traffic: without drafts, with recall, and with training.

    The settings are those of the service. The scenario has all other assumptions: machines, traffic, domains, prices,
    and limits that the product does not have yet.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    try:
        scenario = load_scenario(scenario_file, assumed or ())
    except ConfigError as error:
        fail(error)
    if not settings.trains or not settings.capture.enabled:
        fail("training is off: set trainer.enabled and capture.enabled, and a drafter.kind with training")
    if settings.engine.slots > settings.serving.max_queue:
        fail("serving.max_queue must be at least engine.slots: otherwise replicas refuse requests with slots free")
    try:
        from osd.cli import simulate_tables as report
        from osd.simulation.simulation import Simulation
        from osd.simulation.step_costs import CostsError
        from osd.traffic.prompt import TrafficError
    except ModuleNotFoundError as error:
        fail(f"osd simulate needs {error.name}: pip install 'osd-llm[simulate]'")
    with stop_signals():
        try:
            simulation = Simulation(settings, scenario, say)
            best = simulation.search() if search else None
            if best is not None:
                simulation = simulation.choose(*best.choice)
            runs = simulation.runs()
            bill = simulation.bill()
        except (CostsError, TrafficError) as error:
            fail(error)
    tables = [report.work_table(runs), report.training_table(runs["trained"]), report.bill_table(bill)]
    tables += [] if best is None else [report.search_table(best)]
    figures = report.deployment_figures(simulation.settings, simulation.scenario, runs, bill, best)
    notes = report.deployment_notes(settings, scenario)
    plots = report.deployment_plots(runs, bill)
    conclude(tables, figures, json_file, plots=plots, plot=plot, notes=notes, markdown=markdown, as_json=as_json)
