"""What learning earned through the whole service, as tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.adaptation.net import FED, FROZEN, TRAINING, WAYS, Found
from benchmarks.adaptation.report import Plot, Table
from benchmarks.adaptation.turn import Turn


def _milliseconds(name: str) -> Callable[[Turn], float | None]:
    def value(turn: Turn) -> float | None:
        seconds = turn.clients[name]
        return None if seconds is None else 1e3 * seconds

    return value


FIGURES: dict[str, Callable[[Turn], float | None]] = {
    "tokens per busy second": lambda turn: turn.speed,
    "the same, training CPU charged": lambda turn: turn.charged_speed,
    "tokens per CPU second": lambda turn: turn.tokens_per_cpu_second,
    "CPU seconds, all processes": lambda turn: turn.cpu_seconds,
    "CPU seconds, training": lambda turn: turn.training_cpu_seconds,
    "tokens/s at the clients": lambda turn: turn.clients["tokens_per_second"],
    "between two pieces, p50 ms": _milliseconds("gaps_p50"),
    "between two pieces, p99 ms": _milliseconds("gaps_p99"),
    "a token after the first, p50 ms": _milliseconds("per_token_p50"),
    "a token after the first, p99 ms": _milliseconds("per_token_p99"),
    "first token, p50 ms": _milliseconds("first_token_p50"),
    "first token, p99 ms": _milliseconds("first_token_p99"),
    "engine busy, share of time": lambda turn: turn.busy,
    "acceptance rate": lambda turn: turn.acceptance,
    "swaps": lambda turn: turn.swaps,
}


def net_table(found: Found) -> Table:
    """Medians over the turns with the range, and the ratios to the frozen drafter within a turn."""
    rows = []
    for name, value in FIGURES.items():
        values = {way: [value(turn[way]) for turn in found.turns] for way in WAYS}
        cells = [_median(values[way], None) for way in WAYS]
        rows.append((name, *cells, *(_median(_ratios(values[way], values[FROZEN]), 3) for way in (TRAINING, FED))))
    columns = ("", *WAYS, f"{TRAINING} / {FROZEN}", f"{FED} / {FROZEN}")
    return Table("the same traffic, served", columns, rows)


def capacity_note(found: Found) -> str:
    """How the load came about."""
    capacity = found.capacity
    return (
        f"With the first drafter {capacity.requests} requests at once were answered at "
        f"{capacity.requests_per_second:.3f} requests and {capacity.tokens_per_second:.1f} tokens a second; "
        f"the traffic came at {found.rate:.3f} requests a second, "
        f"{found.rate / capacity.requests_per_second:.0%} of that."
    )


def net_plots(found: Found) -> list[Plot]:
    """The first turn's acceptance rate, and its tokens per busy second as a share of the largest."""
    turn = found.turns[0]
    most = max(speed for one in turn.values() for _, _, speed in one.curve)
    acceptance = {way: [(requests, rate) for requests, rate, _ in turn[way].curve] for way in WAYS}
    speeds = {way: [(requests, speed / most) for requests, _, speed in turn[way].curve] for way in WAYS}
    return [
        Plot("acceptance rate: accepted / drafted", acceptance),
        Plot(f"tokens per busy second, of {most:.0f}", speeds),
    ]


def _ratios(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    return [one / other if one is not None and other else None for one, other in zip(mine, theirs, strict=True)]


def _median(values: Sequence[float | None], places: int | None) -> str:
    """The median and the range, "-" where a turn has no figure; ``places`` as the size asks for when None."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return "-"
    middle = statistics.median(numbers)
    places = (3 if abs(middle) < 2 else 1) if places is None else places
    text = f"{middle:.{places}f}"
    return text if len(numbers) == 1 else f"{text} ({min(numbers):.{places}f} to {max(numbers):.{places}f})"
