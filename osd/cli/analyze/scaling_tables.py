"""Tables, plots and JSON of fitted scaling laws and predictions."""

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
    f"Intervals contain {INTERVAL:.0%} of a bootstrap over points, with resampled residuals and a new fit each time. "
    "They cover the scatter of points about the curves, but no other stream, target or machine.",
)

_CURVE = 33  # points of a line in the plot

_FIGURES: dict[str, tuple[Callable[[Prediction], float], int]] = {
    "divergence, nats per token": (lambda expected: expected.divergence, 3),
    "c, a drafter forward in plain forwards": (lambda expected: expected.step, 3),
    "CPU seconds of training": (lambda expected: expected.seconds, 0),
    "temperature 1: acceptance": (lambda expected: expected.sampled.acceptance, 3),
    "  tokens of a draft": (lambda expected: expected.sampled.depth, 0),
    "  tokens per step": (lambda expected: expected.sampled.length, 2),
    "  speed-up": (lambda expected: expected.sampled.speedup, 2),
    "  served tokens until training is paid back": (lambda expected: expected.sampled.payback, 0),
    "greedy: acceptance": (lambda expected: expected.greedy.acceptance, 3),
    "  tokens of a greedy draft": (lambda expected: expected.greedy.depth, 0),
    "  tokens per greedy step": (lambda expected: expected.greedy.length, 2),
    "  greedy speed-up": (lambda expected: expected.greedy.speedup, 2),
    "  greedily served tokens until training is paid back": (lambda expected: expected.greedy.payback, 0),
}


def law_table(forecaster: Forecaster) -> Table:
    """Return the constants of the fit and the number of points."""
    model, baseline = forecaster.model, forecaster.baseline
    fit, law, run = model.fit, model.fit.law, forecaster.points[0].run
    rows = [
        ("exponents", "shared" if fit.tied else "separate"),
        ("criterion (of the other form)", f"{fit.criterion:.1f} ({model.other.criterion:.1f})"),
        ("H, the target's entropy, nats per token", f"{baseline.entropy:.4f}"),
        ("E, the loss at unlimited size and traffic", f"{baseline.entropy + law.floor:.4f}"),
        ("A, a", f"{law.size_factor:.5g}, {law.size_exponent:.4f}"),
        ("B, b", f"{law.data_factor:.5g}, {law.data_exponent:.4f}"),
        ("root mean square error, nats", f"{fit.error:.4f}"),
        ("temperature 1: 1 - acceptance", f"{model.sampled.limit:.3f} (1 - exp(-{model.sampled.rate:.3f} KL))"),
        ("greedy: 1 - acceptance", f"{model.greedy.limit:.3f} (1 - exp(-{model.greedy.rate:.3f} KL))"),
        ("c", f"{model.step.base:.3f} + {model.step.slope * 1e6:.4f} N / 1e6"),
        ("v of 2 and more tokens", " ".join(f"{cost:.2f}" for cost in baseline.verify)),
        ("rest of a step, in plain forwards", f"{model.rest:.3f}"),
        ("plain forward, ms", f"{1e3 * baseline.plain:.2f}"),
        (
            "training, CPU ms per token",
            f"{1e3 * model.seconds.base:.2f} + {1e3 * model.seconds.slope * 1e6:.3f} N / 1e6",
        ),
    ]
    title = f"{run.target} on {run.stream}: L = E + A N^-a + B D^-b, {len(forecaster.points)} points"
    return Table(title, ("", "fitted"), rows)


def held_out_table(name: str, forecaster: Forecaster, held_out: Sequence[Point]) -> Table:
    """Return measurements of held-out points, and the predictions of ``forecaster``, fitted without these points."""
    rows = []
    for point in held_out:
        forecast = forecaster.predict(point.parameters, point.tokens, point.run.depth)
        rows.append((f"{_layers(point.layers)}, {point.records} records, {point.tokens} tokens", "", ""))
        rows += [
            (f"  {figure}", _interval(forecast, get, digits), f"{measured:.{digits}f}")
            for figure, get, digits, measured in (
                ("divergence, nats per token", lambda value: value.divergence, 2, point.divergence),
                ("acceptance at temperature 1", lambda value: value.sampled.acceptance, 3, 1 - point.total_variation),
                ("greedy acceptance", lambda value: value.greedy.acceptance, 3, point.agreement),
                ("tokens per greedy step", lambda value: value.greedy.length, 2, point.length),
                ("greedy speed-up", lambda value: value.greedy.speedup, 2, point.speedup),
                ("CPU seconds of training", lambda value: value.seconds, 0, point.cpu_seconds),
            )
        ]
    return Table(f"{name}, held out", ("", "predicted (interval)", "measured"), rows)


def forecast_table(parameters: float, tokens: float, forecast: Forecast) -> Table:
    """Return a table with the expected value and the interval of each predicted figure."""
    rows = [(name, _interval(forecast, get, digits)) for name, (get, digits) in _FIGURES.items()]
    return Table(f"{parameters:,.0f} parameters after {tokens:,.0f} tokens", ("", "expected (interval)"), rows)


def _interval(forecast: Forecast, get: Callable[[Prediction], float], digits: int) -> str:
    middle, least, most = (
        f"{get(prediction):.{digits}f}" if math.isfinite(get(prediction)) else "never"
        for prediction in (forecast.expected, forecast.least, forecast.most)
    )
    return f"{middle} ({least} to {most})"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def plot(forecaster: Forecaster) -> Plot:
    """Return a plot of greedy acceptance over traffic, with the fit and the measured points of each size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    dots: dict[str, list[tuple[float, float]]] = {}
    amounts = [point.tokens for point in forecaster.points]
    for layers in sorted({point.layers for point in forecaster.points}):
        points = [point for point in forecaster.points if point.layers == layers]
        name, size = _layers(layers), points[0].parameters
        lines[name] = [
            (tokens, forecaster.model.predict(size, tokens).greedy.acceptance)
            for tokens in np.geomspace(min(amounts), max(amounts), _CURVE).tolist()
        ]
        dots[name] = [(point.tokens, point.agreement) for point in points]
    title = f"{forecaster.points[0].run.stream}: greedy acceptance, measured (dots) and fitted"
    return Plot(title, lines, dots=dots, unit="tokens of traffic")


def figures(forecaster: Forecaster) -> dict[str, Any]:
    """Return the constants of the fit as JSON."""
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
    """Return a prediction as JSON; an infinite payback is null."""
    predictions = {name: _finite(asdict(getattr(forecast, name))) for name in ("expected", "least", "most")}
    return {"parameters": parameters, "tokens": tokens, **predictions}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with None in place of infinite values."""
    return {
        name: _finite(value) if isinstance(value, dict) else value if math.isfinite(value) else None
        for name, value in values.items()
    }
