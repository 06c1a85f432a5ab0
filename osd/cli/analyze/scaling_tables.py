"""Fitted scaling laws, predictions beside measurements, and their plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from osd.analysis.scaling.forecast import INTERVAL, Forecast, Forecaster
from osd.analysis.scaling.model import Prediction
from osd.analysis.scaling.points import Point
from osd.cli.report import Plot, Table

NOTES = (
    f"Intervals hold {INTERVAL:.0%} of a bootstrap over points: residuals are dealt out again and everything is fitted "
    "again. They cover what points scatter about the curves, and no other stream, target or machine.",
)

_CURVE = 33  # points of a line in the plot

_FIGURES: dict[str, tuple[Callable[[Prediction], float], int]] = {
    "divergence, nats a token": (lambda one: one.divergence, 3),
    "c, a step in plain forwards": (lambda one: one.step, 3),
    "CPU seconds of training": (lambda one: one.seconds, 0),
    "temperature 1: acceptance": (lambda one: one.sampled.acceptance, 3),
    "  tokens of a draft": (lambda one: one.sampled.depth, 0),
    "  tokens a round": (lambda one: one.sampled.length, 2),
    "  speed-up": (lambda one: one.sampled.speedup, 2),
    "  served tokens until training is paid back": (lambda one: one.sampled.payback, 0),
    "greedy: acceptance": (lambda one: one.greedy.acceptance, 3),
    "  tokens of a greedy draft": (lambda one: one.greedy.depth, 0),
    "  tokens a greedy round": (lambda one: one.greedy.length, 2),
    "  greedy speed-up": (lambda one: one.greedy.speedup, 2),
    "  greedily served tokens until it is paid back": (lambda one: one.greedy.payback, 0),
}


def law_table(forecaster: Forecaster) -> Table:
    """What was fitted, to how many points."""
    model, baseline = forecaster.model, forecaster.baseline
    fit, law, run = model.fit, model.fit.law, forecaster.points[0].run
    rows = [
        ("exponents", "one for both" if fit.tied else "one each"),
        ("criterion (the other form's)", f"{fit.criterion:.1f} ({model.other.criterion:.1f})"),
        ("H, the target's entropy, nats a token", f"{baseline.entropy:.4f}"),
        ("E, with what endless size and traffic leave", f"{baseline.entropy + law.floor:.4f}"),
        ("A, a", f"{law.size_factor:.5g}, {law.size_exponent:.4f}"),
        ("B, b", f"{law.data_factor:.5g}, {law.data_exponent:.4f}"),
        ("root mean square error, nats", f"{fit.error:.4f}"),
        ("temperature 1: 1 - acceptance", f"{model.sampled.limit:.3f} (1 - exp(-{model.sampled.rate:.3f} KL))"),
        ("greedy: 1 - acceptance", f"{model.greedy.limit:.3f} (1 - exp(-{model.greedy.rate:.3f} KL))"),
        ("c", f"{model.step.base:.3f} + {model.step.slope * 1e6:.4f} N / 1e6"),
        ("v of 2 tokens and more", " ".join(f"{one:.2f}" for one in baseline.verify)),
        ("rest of a round, in plain forwards", f"{model.rest:.3f}"),
        ("a plain forward, ms", f"{1e3 * baseline.plain:.2f}"),
        ("training, CPU ms a token", f"{1e3 * model.seconds.base:.2f} + {1e3 * model.seconds.slope * 1e6:.3f} N / 1e6"),
    ]
    title = f"{run.target} on {run.stream}: L = E + A N^-a + B D^-b, {len(forecaster.points)} points"
    return Table(title, ("", "fitted"), rows)


def held_out_table(name: str, forecaster: Forecaster, held: Sequence[Point]) -> Table:
    """Points as they are, beside what ``forecaster`` expects of them without knowing any."""
    rows = []
    for point in held:
        found = forecaster.predict(point.parameters, point.tokens, point.run.depth)
        rows.append((f"{_layers(point.layers)}, {point.records} records, {point.tokens} tokens", "", ""))
        rows += [
            (f"  {figure}", _between(found, get, digits), f"{measured:.{digits}f}")
            for figure, get, digits, measured in (
                ("divergence, nats a token", lambda one: one.divergence, 2, point.divergence),
                ("acceptance at temperature 1", lambda one: one.sampled.acceptance, 3, 1 - point.total_variation),
                ("greedy acceptance", lambda one: one.greedy.acceptance, 3, point.agreement),
                ("tokens a greedy round", lambda one: one.greedy.length, 2, point.length),
                ("greedy speed-up", lambda one: one.greedy.speedup, 2, point.speedup),
                ("CPU seconds of training", lambda one: one.seconds, 0, point.cpu_seconds),
            )
        ]
    return Table(f"{name}, held out", ("", "predicted (interval)", "measured"), rows)


def forecast_table(parameters: float, tokens: float, forecast: Forecast) -> Table:
    """One prediction."""
    rows = [(name, _between(forecast, get, digits)) for name, (get, digits) in _FIGURES.items()]
    return Table(f"{parameters:,.0f} parameters after {tokens:,.0f} tokens", ("", "expected (interval)"), rows)


def _between(found: Forecast, get: Callable[[Prediction], float], digits: int) -> str:
    middle, least, most = (
        f"{get(one):.{digits}f}" if math.isfinite(get(one)) else "never"
        for one in (found.expected, found.least, found.most)
    )
    return f"{middle} ({least} to {most})"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def plot(forecaster: Forecaster) -> Plot:
    """Greedy acceptance over traffic: a line of the fit for each size, and the measured points."""
    lines: dict[str, list[tuple[float, float]]] = {}
    dots: dict[str, list[tuple[float, float]]] = {}
    amounts = [point.tokens for point in forecaster.points]
    for layers in sorted({point.layers for point in forecaster.points}):
        mine = [point for point in forecaster.points if point.layers == layers]
        name, size = _layers(layers), mine[0].parameters
        lines[name] = [
            (tokens, forecaster.model.predict(size, tokens).greedy.acceptance)
            for tokens in np.geomspace(min(amounts), max(amounts), _CURVE).tolist()
        ]
        dots[name] = [(point.tokens, point.agreement) for point in mine]
    title = f"{forecaster.points[0].run.stream}: greedy acceptance, measured (dots) and fitted"
    return Plot(title, lines, dots=dots, unit="tokens of traffic")


def figures(forecaster: Forecaster) -> dict[str, Any]:
    """What was fitted."""
    model = forecaster.model
    return {
        "points": len(forecaster.points),
        "baseline": asdict(forecaster.baseline),
        "law": asdict(model.fit),
        "other_form": asdict(model.other),
        "sampled": asdict(model.sampled),
        "greedy": asdict(model.greedy),
        "step": asdict(model.step),
        "rest": model.rest,
        "seconds": asdict(model.seconds),
    }


def forecast_figures(parameters: float, tokens: float, forecast: Forecast) -> dict[str, Any]:
    """One prediction; a payback that never comes is null."""
    found = {name: _finite(asdict(getattr(forecast, name))) for name in ("expected", "least", "most")}
    return {"parameters": parameters, "tokens": tokens, **found}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same with null for what is infinite."""
    return {
        name: _finite(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for name, value in values.items()
    }
