"""Tables, plots and JSON of a simulated deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osd.cli.report import Plot, Table
from osd.config import Scenario, Settings
from osd.metrics import acceptance_rate
from osd.simulation.bill import Bill
from osd.simulation.deployment import SimulationResult
from osd.simulation.knowledge import TRAINED, WAYS
from osd.simulation.simulation import SearchResult

_GIGA = 1e9


def work_table(runs: Mapping[str, SimulationResult]) -> Table:
    """Return the table of requests, tokens and busy time of all replicas, with a column for each way of drafting."""
    table = Table("same traffic", ("", *WAYS), [])
    for name, value in {
        "requests answered": lambda run: f"{run.work.answered:.0f}",
        "requests refused, queue full": lambda run: f"{run.work.refused:.0f}",
        "tokens per second": lambda run: f"{run.work.tokens / run.seconds:.0f}",
        "tokens per busy second of a replica": lambda run: f"{run.work.tokens / run.work.busy:.1f}",
        "share of time a replica is busy": lambda run: f"{run.work.busy / run.replicas / run.seconds:.3f}",
        "milliseconds per token, with queue and prompt": lambda run: f"{1e3 * run.work.stayed / run.work.tokens:.2f}",
        "acceptance rate": lambda run: f"{acceptance_rate(run.work.accepted, run.work.drafted):.3f}",
        "tokens per step of the longest drafts, at the end": lambda run: f"{run.curve[-1].length:.2f}",
    }.items():
        table.rows.append((name, *(value(runs[way]) for way in WAYS)))
    return table


def training_table(run: SimulationResult) -> Table:
    """Return the table of trace data written and read, of version data pulled by nodes, and of the training."""
    captured, hours = run.captured, run.seconds / 3600
    offered = captured.records + captured.over_budget
    spread = [version.everywhere - version.made for version in run.versions]
    rows = [
        ("written to streams, GB per hour", f"{captured.written / _GIGA / hours:.1f}"),
        ("written to streams, MB per second", f"{captured.written / 1e6 / run.seconds:.1f}"),
        ("read by trainers, GB per hour", f"{captured.read_bytes / _GIGA / hours:.1f}"),
        ("share of requests with a written record", f"{captured.records / offered:.4f}" if offered else "-"),
        ("records trimmed before they were read", f"{captured.unread:.0f}"),
        ("seconds of training, with gates", f"{run.training:.0f}"),
        ("tokens trained, with repeats", f"{run.trained_tokens:.0f}"),
        ("gates, versions", f"{run.gates}, {len(run.versions)}"),
        ("pulled by nodes, GB per hour", f"{run.pulled / _GIGA / hours:.1f}"),
        ("seconds until the last node has a version, worst", f"{max(spread):.1f}" if spread else "-"),
    ]
    return Table("training", ("", "all replicas"), rows)


def bill_table(bill: Bill) -> Table:
    """Return the replicas that are needed, the savings and the cost."""
    rows = [
        *((f"replicas needed, {way}", f"{bill.needed[way]:.1f}, {bill.at_end[way]:.1f} at the end") for way in WAYS),
        ("saved by recall and the first version", f"{bill.saved_by_drafts:.3f}"),
        ("saved additionally by training", f"{bill.saved_by_training:.3f}"),
        ("paid for trainers", f"{bill.trainers:.3f}"),
        (f"paid for {bill.redis_servers} Redis servers", f"{bill.stores:.3f}"),
        ("paid for bytes moved", f"{bill.traffic:.3f}"),
        ("net of training", f"{bill.net:.3f}"),
        ("payback time of training", "not in this time" if bill.payback is None else f"{bill.payback:.0f} s"),
    ]
    title = f"savings and cost in {bill.hours:.2f} hours, in the currency of the prices"
    return Table(title, ("", "all replicas"), rows)


def search_table(best: SearchResult) -> Table:
    """Return a row for each tried combination of trainers and capture budget, largest net savings first."""
    table = Table("net of training by trainers and capture budget", ("trainers", "budget, MB per second", "net"), [])
    for (trainers, budget), net in sorted(best.tried.items(), key=lambda item: -item[1]):
        row = (f"{trainers}", "everything" if budget is None else f"{budget / 1e6:.1f}", f"{net:.3f}")
        table.rows.append(row)
    return table


def deployment_plots(runs: Mapping[str, SimulationResult], bill: Bill) -> list[Plot]:
    """Return plots over time: tokens per step, cost and savings of training, and bytes written to streams."""
    longest = max(point.length for run in runs.values() for point in run.curve)
    lengths = {
        way: [(_hours(point.seconds), point.length / longest) for point in run.curve] for way, run in runs.items()
    }
    most = max(1e-9, *(max(entry.cost, entry.saved) for entry in bill.account))
    account = {
        "paid": [(_hours(entry.seconds), entry.cost / most) for entry in bill.account],
        "saved": [(_hours(entry.seconds), max(entry.saved, 0.0) / most) for entry in bill.account],
    }
    trained, written = runs[TRAINED], runs[TRAINED].captured.written
    plots = [
        Plot(f"tokens per step of the longest drafts, 1.0 is {longest:.2f}", lengths, unit="hours"),
        Plot(f"cost and savings of training, 1.0 is {most:.3g}", account, unit="hours"),
    ]
    if written:
        bytes_ = {"written": [(_hours(point.seconds), point.written / written) for point in trained.curve]}
        plots.append(Plot(f"written to streams, 1.0 is {written / _GIGA:.1f} GB", bytes_, unit="hours"))
    return plots


def _hours(seconds: float) -> float:
    return seconds / 3600


def deployment_notes(settings: Settings, scenario: Scenario) -> list[str]:
    """Return a note on the number of simulated replicas and the source of the costs."""
    replicas = settings.serving.replicas
    simulated = min(replicas, scenario.replicas)
    each = f"{simulated} of {replicas} replicas were simulated; each stands for {replicas / simulated:g}"
    return [f"{each}. {SOURCES[scenario.costs.kind](scenario)}"]


def _published(scenario: Scenario) -> str:
    from osd.simulation.step_costs import GPUS, MODELS

    costs: Any = scenario.costs
    gpu, model = GPUS[costs.gpu], MODELS[costs.model]
    return (
        f"Costs are a roofline of published figures: {gpu.source} ({gpu.bandwidth / 1e12:g} TB/s, "
        f"{gpu.operations / 1e12:g} TFLOPS of dense bfloat16), {model.source}. Assumed efficiency: "
        f"{costs.efficiency:.0%} for serving, {costs.training_efficiency:.0%} for training."
    )


def _measured(scenario: Scenario) -> str:
    from osd.simulation.step_costs import CostMeasurement

    costs: Any = scenario.costs
    return f"Costs were measured: {CostMeasurement.read(costs.file).machine}."


SOURCES = {"published": _published, "measured": _measured}
"""Functions that describe the source of the costs, by kind."""


def deployment_figures(
    settings: Settings, scenario: Scenario, runs: Mapping[str, SimulationResult], bill: Bill, best: SearchResult | None
) -> dict[str, Any]:
    """Return the settings, the scenario and all results as JSON."""
    tried: Sequence[Any] = [] if best is None else [(*choice, net) for choice, net in best.tried.items()]
    return {
        "settings": settings.model_dump(mode="json", exclude={"serving": {"api_key", "admin_key"}, "redis_url": True}),
        "scenario": scenario.model_dump(mode="json"),
        "runs": {way: asdict(run) for way, run in runs.items()},
        "bill": bill.figures(),
        "search": None if best is None else {"best": best.choice, "net": best.net, "tried": tried},
    }
