"""A simulated deployment as tables, plots and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osd.cli.report import Plot, Table
from osd.config import Scenario, Settings
from osd.metrics import acceptance_rate
from osd.simulation.bill import Bill
from osd.simulation.deployment import Outcome
from osd.simulation.knowledge import TRAINED, WAYS
from osd.simulation.simulation import Best

_GIGA = 1e9


def work_table(runs: Mapping[str, Outcome]) -> Table:
    """What all replicas did in each way."""
    table = Table("the same traffic", ("", *WAYS), [])
    for name, value in {
        "requests answered": lambda one: f"{one.work.answered:.0f}",
        "refused, a full queue": lambda one: f"{one.work.refused:.0f}",
        "tokens a second": lambda one: f"{one.work.tokens / one.seconds:.0f}",
        "tokens per busy second of a replica": lambda one: f"{one.work.tokens / one.work.busy:.1f}",
        "replica busy, share of time": lambda one: f"{one.work.busy / one.replicas / one.seconds:.3f}",
        "milliseconds a token, waiting and prompt included": lambda one: (
            f"{1e3 * one.work.stayed / one.work.tokens:.2f}"
        ),
        "acceptance rate": lambda one: f"{acceptance_rate(one.work.accepted, one.work.drafted):.3f}",
        "tokens per round of the longest drafts, in the end": lambda one: f"{one.curve[-1].length:.2f}",
    }.items():
        table.rows.append((name, *(value(runs[way]) for way in WAYS)))
    return table


def training_table(run: Outcome) -> Table:
    """What was written, read, trained and pulled."""
    captured, hours = run.captured, run.seconds / 3600
    asked = captured.records + captured.over_budget
    spread = [one.everywhere - one.made for one in run.versions]
    rows = [
        ("written to streams, GB an hour", f"{captured.written / _GIGA / hours:.1f}"),
        ("written, MB a second", f"{captured.written / 1e6 / run.seconds:.1f}"),
        ("read by trainers, GB an hour", f"{captured.read_bytes / _GIGA / hours:.1f}"),
        ("records written, of those answered", f"{captured.records / asked:.4f}" if asked else "-"),
        ("records trimmed before they were read", f"{captured.unread:.0f}"),
        ("seconds of training, gates included", f"{run.training:.0f}"),
        ("tokens trained, repeats included", f"{run.trained_tokens:.0f}"),
        ("gates, versions", f"{run.gates}, {len(run.versions)}"),
        ("pulled by nodes, GB an hour", f"{run.pulled / _GIGA / hours:.1f}"),
        ("seconds until the last node has a version, worst", f"{max(spread):.1f}" if spread else "-"),
    ]
    return Table("training", ("", "all replicas"), rows)


def bill_table(bill: Bill) -> Table:
    """Replicas needed, what was saved and paid."""
    rows = [
        *((f"replicas needed, {way}", f"{bill.needed[way]:.1f}, {bill.at_end[way]:.1f} in the end") for way in WAYS),
        ("saved by recall and the first version", f"{bill.saved_by_drafts:.3f}"),
        ("saved by training beyond that", f"{bill.saved_by_training:.3f}"),
        ("paid for trainers", f"{bill.trainers:.3f}"),
        (f"paid for {bill.redis_servers} Redis servers", f"{bill.stores:.3f}"),
        ("paid for bytes moved", f"{bill.traffic:.3f}"),
        ("net of training", f"{bill.net:.3f}"),
        ("training has paid after", "not in this time" if bill.payback is None else f"{bill.payback:.0f} s"),
    ]
    return Table(f"saved and paid in {bill.hours:.2f} hours, in the currency of the prices", ("", "all replicas"), rows)


def search_table(best: Best) -> Table:
    """All that was tried, and what was best."""
    table = Table("net of training by trainers and capture budget", ("trainers", "budget, MB a second", "net"), [])
    for (trainers, budget), net in sorted(best.tried.items(), key=lambda one: -one[1]):
        row = (f"{trainers}", "everything" if budget is None else f"{budget / 1e6:.1f}", f"{net:.3f}")
        table.rows.append(row)
    return table


def deployment_plots(runs: Mapping[str, Outcome], bill: Bill) -> list[Plot]:
    """Over the hours: tokens per round, how busy replicas are, and what training cost and saved."""
    longest = max(look.length for run in runs.values() for look in run.curve)
    lengths = {way: [(_hours(one.seconds), one.length / longest) for one in run.curve] for way, run in runs.items()}
    most = max(1e-9, *(max(one.cost, one.saved) for one in bill.account))
    account = {
        "paid": [(_hours(one.seconds), one.cost / most) for one in bill.account],
        "saved": [(_hours(one.seconds), max(one.saved, 0.0) / most) for one in bill.account],
    }
    trained, written = runs[TRAINED], runs[TRAINED].captured.written
    plots = [
        Plot(f"tokens per round of the longest drafts, of {longest:.2f}", lengths, unit="hours"),
        Plot(f"training paid and saved, of {most:.3g}", account, unit="hours"),
    ]
    if written:
        bytes_ = {"written": [(_hours(one.seconds), one.written / written) for one in trained.curve]}
        plots.append(Plot(f"written to streams, of {written / _GIGA:.1f} GB", bytes_, unit="hours"))
    return plots


def _hours(seconds: float) -> float:
    return seconds / 3600


def deployment_notes(settings: Settings, scenario: Scenario) -> list[str]:
    """What the figures are of."""
    replicas = settings.serving.replicas
    simulated = min(replicas, scenario.replicas)
    each = f"{simulated} of {replicas} replicas were simulated, each for {replicas / simulated:g}"
    return [f"{each}. {SOURCES[scenario.costs.kind](scenario)}"]


def _published(scenario: Scenario) -> str:
    from osd.simulation.round_costs import GPUS, MODELS

    costs: Any = scenario.costs
    gpu, model = GPUS[costs.gpu], MODELS[costs.model]
    return (
        f"Costs are a roofline of published figures: {gpu.source} ({gpu.bandwidth / 1e12:g} TB/s, "
        f"{gpu.operations / 1e12:g} TFLOPS of dense bfloat16), {model.source}; that {costs.efficiency:.0%} of it is "
        f"reached, and {costs.training_efficiency:.0%} by training, is assumed."
    )


def _measured(scenario: Scenario) -> str:
    from osd.simulation.round_costs import Measured

    costs: Any = scenario.costs
    return f"Costs were measured: {Measured.read(costs.file).machine}."


SOURCES = {"published": _published, "measured": _measured}
"""Where costs come from, in words, by their kind."""


def deployment_figures(
    settings: Settings, scenario: Scenario, runs: Mapping[str, Outcome], bill: Bill, best: Best | None
) -> dict[str, Any]:
    """All of it, as JSON."""
    tried: Sequence[Any] = [] if best is None else [(*choice, net) for choice, net in best.tried.items()]
    return {
        "settings": settings.model_dump(mode="json", exclude={"serving": {"api_key", "admin_key"}, "redis_url": True}),
        "scenario": scenario.model_dump(mode="json"),
        "runs": {way: asdict(run) for way, run in runs.items()},
        "bill": bill.figures(),
        "search": None if best is None else {"best": best.choice, "net": best.net, "tried": tried},
    }
