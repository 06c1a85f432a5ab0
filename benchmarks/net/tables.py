"""Tables and plots of passes of the same traffic."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.net.passes import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    NetResults,
    ServicePass,
)
from osd.cli.report import Plot, Table
from osd.metrics import acceptance_rate
from osd.simulation.bill import AccountPoint, payback

Figure = Callable[[ServicePass], float | None]
Turn = Mapping[str, ServicePass]
PartFigure = Callable[[Turn, str, float, float], float]

_SPEEDUP = "tokens per busy second, divided by those of plain decoding"

_COMPARED = (
    *((way, PLAIN) for way in WAYS if way != PLAIN),
    (TRAINED, FROZEN),
    (RECALL_FROZEN, RECALL),
    (RECALL_TRAINED, RECALL),
    (RECALL_TRAINED, RECALL_FROZEN),
    (RECALL_TRAINED, FROZEN),
)
_LEARNING = ((TRAINED, FROZEN), (RECALL_TRAINED, RECALL))
"""Pairs of a way with training and the same way without it."""


def _milliseconds(name: str) -> Figure:
    def value(run: ServicePass) -> float | None:
        seconds = run.clients[name]
        return None if seconds is None else 1e3 * seconds

    return value


_SPEED, _CHARGED, _GAPS = "tokens per busy second", "the same, training CPU charged", "between two pieces, p99 ms"
_RATIOS = (_SPEED, _CHARGED, _GAPS)

FIGURES: dict[str, Figure] = {
    _SPEED: lambda run: run.speed,
    _CHARGED: lambda run: run.charged_speed,
    "tokens per CPU second": lambda run: run.tokens_per_cpu_second,
    "CPU seconds, all processes": lambda run: run.cpu_seconds,
    "CPU seconds, training": lambda run: run.end.training,
    "tokens/s at the clients": lambda run: run.clients["tokens_per_second"],
    "tokens of an answer": lambda run: run.end.tokens / run.end.requests,
    "between two pieces, p50 ms": _milliseconds("gaps_p50"),
    _GAPS: _milliseconds("gaps_p99"),
    "a token after the first, p50 ms": _milliseconds("per_token_p50"),
    "a token after the first, p99 ms": _milliseconds("per_token_p99"),
    "first token, p50 ms": _milliseconds("first_token_p50"),
    "first token, p99 ms": _milliseconds("first_token_p99"),
    "engine busy, share of time": lambda run: run.busy,
    "acceptance rate": lambda run: run.acceptance,
    "swaps": lambda run: run.swaps,
}


def net_tables(results: NetResults) -> list[Table]:
    """Return medians over the turns with their range, ratios within a turn, and the cost and saving of training."""
    figures = Table(f"the same traffic, served at {results.load:.0%} of the capacity", ("", *results.ways), [])
    for name, value in FIGURES.items():
        figures.rows.append(
            (name, *(_median([value(turn[way]) for turn in results.turns], None) for way in results.ways))
        )
    ratios = Table("within a turn", ("", *_RATIOS), [])
    for way, base in _measured_pairs(_COMPARED, results):
        by_figure = [[_ratio(FIGURES[name], turn[way], turn[base]) for turn in results.turns] for name in _RATIOS]
        ratios.rows.append((f"{way} / {base}", *(_median(values, 3) for values in by_figure)))
    return [figures, ratios, _paybacks(results)]


def _paybacks(results: NetResults) -> Table:
    columns = ("turn", "core seconds spent", "saved", "paid back after s", "of s")
    table = Table("what training cost and saved", columns, [])
    for number, turn in enumerate(results.turns, 1):
        for way, base in _measured_pairs(_LEARNING, results):
            account = accounts(turn[way], turn[base])
            last, seconds = account[-1], payback(account)
            paid = "not in this pass" if seconds is None else f"{seconds:.0f}"
            figures = (f"{last.cost:.1f}", f"{last.saved:.1f}", paid, f"{last.seconds:.0f}")
            table.rows.append((f"{number}, {way} / {base}", *figures))
    return table


def accounts(trained: ServicePass, untrained: ServicePass) -> list[AccountPoint]:
    """Return the cost and saving of training at each point of ``trained``, compared with ``untrained``.

    The saving is the engine time saved for the same number of answered requests; it includes slower decoding steps
    during training. The cost is the trainer's CPU time.
    """
    return [
        AccountPoint(
            point.seconds, point.training, trained.cores * (_until(untrained, "busy", point.requests) - point.busy)
        )
        for point in trained.curve
    ]


def _until(run: ServicePass, name: str, requests: float) -> float:
    """Return a total of ``run``, such as its tokens, until ``requests`` requests were answered."""
    answered, totals = ([getattr(point, field) for point in run.curve] for field in ("requests", name))
    return float(np.interp(requests, answered, totals))


def capacity_note(results: NetResults) -> str:
    """Return a sentence about the capacity and the load."""
    capacity = results.capacity
    return (
        f"Without drafts {capacity.requests} requests at once were answered at "
        f"{capacity.requests_per_second:.3f} requests and {capacity.tokens_per_second:.1f} tokens a second; "
        f"the traffic came at {results.rate:.3f} requests a second, "
        f"{results.load:.0%} of that."
    )


def net_plots(results: NetResults) -> list[Plot]:
    """Plot acceptance and speed as medians over the turns with their range, and cost and saving in the first turn.

    If plain decoding was measured, the plot shows the speed-up over it for the same requests. Savings below 0 are drawn
    as 0.
    """
    drafting = [way for way in results.ways if way != PLAIN]
    title = "acceptance rate: accepted / drafted"
    plots = [_plot(title, results, drafting, _acceptance), _speed_plot(results, drafting)]
    turn = results.turns[0]
    for way, base in _measured_pairs(_LEARNING, results):
        account = accounts(turn[way], turn[base])
        most = max(1.0, *(max(point.cost, point.saved) for point in account))
        lines = {
            "spent": [(point.seconds, point.cost / most) for point in account],
            "saved": [(point.seconds, max(point.saved, 0.0) / most) for point in account],
        }
        plots.append(Plot(f"{way} / {base}: seconds of a core, of {most:.0f}", lines, unit="seconds"))
    return plots


def _speed_plot(results: NetResults, drafting: Sequence[str]) -> Plot:
    if PLAIN not in results.ways:
        return _plot("tokens per busy second", results, drafting, _speed)

    def speedup(turn: Turn, way: str, first: float, last: float) -> float:
        return _speed(turn, way, first, last) / _speed(turn, PLAIN, first, last)

    return _plot(_SPEEDUP, results, [*drafting, PLAIN], speedup)


def load_table(loads: Sequence[NetResults]) -> Table:
    """Return the speed-up over plain decoding at each load, as medians over the turns with their range."""
    ways = [way for way in loads[0].ways if way != PLAIN]
    table = Table(_SPEEDUP, ("load", *ways), [])
    for results in loads:
        table.rows.append((f"{results.load:.0%}", *(_median(_speedups(results, way), 3) for way in ways)))
    return table


def load_plot(loads: Sequence[NetResults]) -> Plot:
    """Plot the speed-up over plain decoding by load, as medians over the turns with their range."""
    lines: dict[str, list[tuple[float, float]]] = {way: [] for way in loads[0].ways}
    bands: dict[str, list[tuple[float, float, float]]] = {way: [] for way in lines}
    for results in loads:
        for way, line in lines.items():
            values = _speedups(results, way)
            line.append((100 * results.load, statistics.median(values)))
            bands[way].append((100 * results.load, min(values), max(values)))
    return Plot(_SPEEDUP, lines, dots=lines, unit="% of the plain capacity", bands=bands, top=_top(lines))


def _speedups(results: NetResults, way: str) -> list[float]:
    return [turn[way].speed / turn[PLAIN].speed for turn in results.turns]


def _plot(title: str, results: NetResults, ways: Sequence[str], figure: PartFigure) -> Plot:
    """Plot a figure of each part of the requests, as the curve of the first turn divides them."""
    lines: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for way, line in lines.items():
        for first, last in itertools.pairwise(point.requests for point in results.turns[0][way].curve):
            values = [figure(turn, way, first, last) for turn in results.turns]
            line.append((last, statistics.median(values)))
            if len(values) > 1:
                bands.setdefault(way, []).append((last, min(values), max(values)))
    return Plot(title, lines, unit="requests", bands=bands, top=_top(lines))


def _top(lines: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """Return the upper end of the axis: the next half above the largest value."""
    return max(0.5, math.ceil(2 * max(value for line in lines.values() for _, value in line)) / 2)


def _speed(turn: Turn, way: str, first: float, last: float) -> float:
    """Return the tokens per busy second between two numbers of answered requests."""
    return _between(turn[way], "tokens", first, last) / _between(turn[way], "busy", first, last)


def _acceptance(turn: Turn, way: str, first: float, last: float) -> float:
    """Return the acceptance rate between two numbers of answered requests."""
    accepted, drafted = (_between(turn[way], name, first, last) for name in ("accepted", "drafted"))
    return acceptance_rate(accepted, drafted)


def _between(run: ServicePass, name: str, first: float, last: float) -> float:
    """Return the growth of a total between two numbers of answered requests."""
    return _until(run, name, last) - _until(run, name, first)


def _measured_pairs(pairs: Sequence[tuple[str, str]], results: NetResults) -> list[tuple[str, str]]:
    """Return the pairs with two measured ways."""
    return [pair for pair in pairs if set(pair) <= set(results.ways)]


def _ratio(figure: Figure, run: ServicePass, base: ServicePass) -> float | None:
    value, base_value = figure(run), figure(base)
    return value / base_value if value is not None and base_value else None


def _median(values: Sequence[float | None], places: int | None) -> str:
    """Return median and range as text, "-" if a turn has no figure; None for ``places`` chooses the digits by size."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return "-"
    middle = statistics.median(numbers)
    places = (3 if abs(middle) < 2 else 1) if places is None else places
    text = f"{middle:.{places}f}"
    return text if len(numbers) == 1 else f"{text} ({min(numbers):.{places}f} to {max(numbers):.{places}f})"
