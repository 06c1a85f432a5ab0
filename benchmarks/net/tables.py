"""Tables and plots of passes through the service."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

from benchmarks.net.turn import (
    FROZEN,
    PLAIN,
    RECALL,
    RECALL_FROZEN,
    RECALL_TRAINED,
    TRAINED,
    WAYS,
    Found,
    Turn,
)
from osd.cli.report import Plot, Table
from osd.metrics import acceptance_rate
from osd.simulation.bill import AccountPoint, payback

Figure = Callable[[Turn], float | None]

_COMPARED = (
    *((way, PLAIN) for way in WAYS if way != PLAIN),
    (TRAINED, FROZEN),
    (RECALL_FROZEN, RECALL),
    (RECALL_TRAINED, RECALL),
    (RECALL_TRAINED, RECALL_FROZEN),
    (RECALL_TRAINED, FROZEN),
)
_LEARNING = ((TRAINED, FROZEN), (RECALL_TRAINED, RECALL))
"""What trains, beside the same without training."""


def _milliseconds(name: str) -> Figure:
    def value(turn: Turn) -> float | None:
        seconds = turn.clients[name]
        return None if seconds is None else 1e3 * seconds

    return value


_SPEED, _CHARGED, _GAPS = "tokens per busy second", "the same, training CPU charged", "between two pieces, p99 ms"
_RATIOS = (_SPEED, _CHARGED, _GAPS)

FIGURES: dict[str, Figure] = {
    _SPEED: lambda turn: turn.speed,
    _CHARGED: lambda turn: turn.charged_speed,
    "tokens per CPU second": lambda turn: turn.tokens_per_cpu_second,
    "CPU seconds, all processes": lambda turn: turn.cpu_seconds,
    "CPU seconds, training": lambda turn: turn.end.training,
    "tokens/s at the clients": lambda turn: turn.clients["tokens_per_second"],
    "tokens of an answer": lambda turn: turn.end.tokens / turn.end.requests,
    "between two pieces, p50 ms": _milliseconds("gaps_p50"),
    _GAPS: _milliseconds("gaps_p99"),
    "a token after the first, p50 ms": _milliseconds("per_token_p50"),
    "a token after the first, p99 ms": _milliseconds("per_token_p99"),
    "first token, p50 ms": _milliseconds("first_token_p50"),
    "first token, p99 ms": _milliseconds("first_token_p99"),
    "engine busy, share of time": lambda turn: turn.busy,
    "acceptance rate": lambda turn: turn.acceptance,
    "swaps": lambda turn: turn.swaps,
}


def net_tables(found: Found) -> list[Table]:
    """Medians over the turns with the range; ratios of ways within a turn; cost and saving of training."""
    figures = Table("the same traffic, served", ("", *found.ways), [])
    for name, value in FIGURES.items():
        figures.rows.append((name, *(_median([value(turn[way]) for turn in found.turns], None) for way in found.ways)))
    ratios = Table("within a turn", ("", *_RATIOS), [])
    for one, other in _present(_COMPARED, found):
        of_ways = [[_ratio(FIGURES[name], turn[one], turn[other]) for turn in found.turns] for name in _RATIOS]
        ratios.rows.append((f"{one} / {other}", *(_median(values, 3) for values in of_ways)))
    return [figures, ratios, _paybacks(found)]


def _paybacks(found: Found) -> Table:
    columns = ("turn", "core seconds spent", "saved", "paid back after s", "of s")
    table = Table("what training cost and saved", columns, [])
    for number, turn in enumerate(found.turns, 1):
        for one, other in _present(_LEARNING, found):
            account = accounts(turn[one], turn[other])
            last, seconds = account[-1], payback(account)
            paid = "not in this pass" if seconds is None else f"{seconds:.0f}"
            figures = (f"{last.cost:.1f}", f"{last.saved:.1f}", paid, f"{last.seconds:.0f}")
            table.rows.append((f"{number}, {one} / {other}", *figures))
    return table


def accounts(trained: Turn, untrained: Turn) -> list[AccountPoint]:
    """A pass with training beside one without, at each point of the first.

    Saved is what the engine took less for as many answered requests; what training takes from the rounds beside it is
    in there. The cost is what the trainer computed.
    """
    return [
        AccountPoint(point.seconds, point.training, trained.cores * (_busy(untrained, point.requests) - point.busy))
        for point in trained.curve
    ]


def _busy(turn: Turn, requests: float) -> float:
    """Seconds that the engine computed until so many requests were answered."""
    for one, two in itertools.pairwise(turn.curve):
        if requests <= two.requests:
            return one.busy + (two.busy - one.busy) * (requests - one.requests) / (two.requests - one.requests)
    return turn.end.busy


def capacity_note(found: Found) -> str:
    """How the load came about."""
    capacity = found.capacity
    return (
        f"Without drafts {capacity.requests} requests at once were answered at "
        f"{capacity.requests_per_second:.3f} requests and {capacity.tokens_per_second:.1f} tokens a second; "
        f"the traffic came at {found.rate:.3f} requests a second, "
        f"{found.rate / capacity.requests_per_second:.0%} of that."
    )


def net_plots(found: Found) -> list[Plot]:
    """Of the first turn: acceptance, tokens per busy second of the largest, and what training cost and saved.

    Savings below 0 are drawn as 0.
    """
    turn = found.turns[0]
    acceptance: dict[str, list[tuple[float, float]]] = {way: [] for way in found.ways if way != PLAIN}
    speeds: dict[str, list[tuple[float, float]]] = {way: [] for way in found.ways}
    for way in found.ways:
        for one, two in itertools.pairwise(turn[way].curve):
            speeds[way].append((two.requests, (two.tokens - one.tokens) / (two.busy - one.busy)))
            if way in acceptance:
                rate = acceptance_rate(two.accepted - one.accepted, two.drafted - one.drafted)
                acceptance[way].append((two.requests, rate))
    fastest = max(speed for line in speeds.values() for _, speed in line)
    shares = {way: [(requests, speed / fastest) for requests, speed in line] for way, line in speeds.items()}
    plots = [
        Plot("acceptance rate: accepted / drafted", acceptance, unit="requests"),
        Plot(f"tokens per busy second, of {fastest:.0f}", shares, unit="requests"),
    ]
    for one, other in _present(_LEARNING, found):
        account = accounts(turn[one], turn[other])
        most = max(1.0, *(max(each.cost, each.saved) for each in account))
        lines = {
            "spent": [(each.seconds, each.cost / most) for each in account],
            "saved": [(each.seconds, max(each.saved, 0.0) / most) for each in account],
        }
        plots.append(Plot(f"{one} / {other}: seconds of a core, of {most:.0f}", lines, unit="seconds"))
    return plots


def _present(pairs: Sequence[tuple[str, str]], found: Found) -> list[tuple[str, str]]:
    """Those of the pairs of which both ways were looked at."""
    return [pair for pair in pairs if set(pair) <= set(found.ways)]


def _ratio(value: Figure, mine: Turn, theirs: Turn) -> float | None:
    one, other = value(mine), value(theirs)
    return one / other if one is not None and other else None


def _median(values: Sequence[float | None], places: int | None) -> str:
    """The median and the range, "-" where a turn has no figure; ``places`` as the size asks for when None."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return "-"
    middle = statistics.median(numbers)
    places = (3 if abs(middle) < 2 else 1) if places is None else places
    text = f"{middle:.{places}f}"
    return text if len(numbers) == 1 else f"{text} ({min(numbers):.{places}f} to {max(numbers):.{places}f})"
