"""Definitions of the dashboard's charts, tiles and breakdowns.

An expression uses the keys of metrics: "prompt_tokens - cached_tokens". Metrics with labels are summed over the labels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from serving.metrics.table import REMEMBERED, REPLICA

_NO_DRAFTS = "No drafts in this time range. The next request with drafting appears here within seconds."
_NO_REQUEST = "No requests in this time range. The next request appears here within seconds."


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        name: name in the legend.
        ink: CSS variable of the colour.
        part: expression of the value.
        of: expression that divides ``part``, for charts of ratios.
        dash: whether the line is dashed.
        area: whether the area below the line is filled.
        fact: if not empty, the page lists the value over the whole window under this name.
    """

    name: str
    ink: str
    part: str = ""
    of: str = ""
    dash: bool = False
    area: bool = False
    fact: str = ""


QUANTILES = (Line("median", "--accent"), Line("95 %", "--drafter"), Line("99 %", "--target", dash=True))


@dataclass(frozen=True)
class Chart:
    """Chart over time.

    Attributes:
        id: identifier in the page.
        title: title of the chart.
        note: description below the title.
        kind: ``rate`` is per second. ``share`` and ``mean`` are ratios, shrunk towards the mean of the window where
            counts are small. ``pace`` is the inverse of a mean, ``level`` a gauge, and ``quantiles`` are quantiles of
            the histogram ``of``.
        lines: lines of the chart.
        empty: text while there is no data.
        digits: decimal places of values.
        base: lower end of the axis, which is added to means.
        least: smallest upper end of the axis.
        of: key of the histogram of ``quantiles``.
        counts: expression of the sample size of each value, and its noun.
        tile: title of a tile with the latest value; empty for no tile.
        enough: smallest denominator for the value of the tile.
    """

    id: str
    title: str
    note: str
    kind: Literal["rate", "share", "mean", "pace", "level", "quantiles"]
    lines: tuple[Line, ...]
    empty: str
    digits: int = 0
    base: float = 0
    least: float = 1
    of: str = ""
    counts: tuple[str, str] | None = None
    tile: str = ""
    enough: int = 0


@dataclass(frozen=True)
class Tile:
    """Tile with the total of the counter ``total``, or with the ``gauges``.

    In ``note``, ``{window:key}`` and ``{total:key}`` are replaced by values. The note is highlighted while the counter
    ``alarm`` is above 0.
    """

    id: str
    title: str
    note: str
    total: str = ""
    gauges: tuple[str, ...] = ()
    alarm: str = ""


@dataclass(frozen=True)
class Breakdown:
    """Ratio of accepted to drafted tokens by the label at ``place`` in a name.

    ``own`` excludes other domains. ``steps`` is the key of the steps with a draft, for accepted tokens per step.
    """

    by: str
    part: str
    of: str
    place: int = 1
    own: bool = False
    steps: str = ""


@dataclass(frozen=True)
class Page:
    """Charts, tiles and breakdowns of one page of the dashboard."""

    charts: tuple[Chart, ...]
    tiles: tuple[Tile, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    positions: Breakdown | None = None
    phases: Breakdown | None = None


def _latency(name: str, histogram: str, title: str, note: str, tile: bool = False) -> Chart:
    note = f"{note}, in periods of 30 seconds"
    return Chart(
        name, title, note, "quantiles", QUANTILES, _NO_REQUEST, least=0.001, of=histogram, tile=title if tile else ""
    )


PAGES: dict[str, Page] = {
    "overview": Page(
        charts=(
            Chart("acceptance", "Acceptance rate",
                  "Accepted share of draft tokens, with its range; values from few drafts are near the mean",
                  "share", (Line("acceptance", "--accent", "accepted", "drafted"),), _NO_DRAFTS,
                  counts=("drafted", "drafted"), tile="Acceptance rate", enough=500),
            Chart("speed", "Decoding speed", "Tokens per second of a busy engine", "pace",
                  (Line("tokens/s", "--accent", "busy_seconds", "completion_tokens"),), _NO_REQUEST, least=10),
            Chart("length", "Mean acceptance length", "Tokens per draft, bonus token included", "mean",
                  (Line("length", "--accent", "accepted", "rounds"),), _NO_DRAFTS, digits=2, base=1, least=2,
                  counts=("rounds", "drafts"), tile="Mean acceptance length", enough=150),
        ),
        breakdowns=(Breakdown("source", "source_accepted", "source_drafted"),
                    Breakdown("version", "version_accepted", "version_drafted", 2, own=True),
                    Breakdown("domain", "version_accepted", "version_drafted")),
        positions=Breakdown("position", "accepted_per_position", "rounds"),
        phases=Breakdown("phase", "phase_accepted", "phase_drafted", steps="phase_rounds"),
    ),
    "traffic": Page(
        charts=(
            _latency("first", "time_to_first_token", "Time to first token",
                     "From the arrival of a request to its first token", tile=True),
            _latency("token", "inter_token", "Time between tokens",
                     "Between two decoding steps that give a sequence tokens", tile=True),
            _latency("request", "request_time", "Request duration", "From the arrival of a request to its last token"),
            _latency("queue", "queue_time", "Time in the queue", "Of finished sequences, until a slot was free"),
            Chart("load", "Queue", "Running and waiting requests", "level",
                  (Line("running", "--accent", "running", area=True), Line("waiting", "--drafter", "waiting")),
                  "No replica has reported yet. A replica reports once a second from its start.", digits=1, least=4),
            Chart("rate", "Tokens", "Per second, all replicas; cached prompt tokens are not computed", "rate",
                  (Line("completion", "--accent", "completion_tokens"),
                   Line("prompt", "--drafter", "prompt_tokens - cached_tokens"),
                   Line("cached prompt", "--target", "cached_tokens", dash=True)), _NO_REQUEST, least=10),
            Chart("draft", "Draft size", "Drafted and accepted tokens per draft", "mean",
                  (Line("drafted", "--accent", "drafted", "rounds", fact="Drafted tokens per draft"),
                   Line("accepted", "--drafter", "accepted", "rounds", fact="Accepted tokens per draft")),
                  _NO_DRAFTS, digits=1, least=4, counts=("rounds", "drafts")),
            Chart("plain", "Tokens without a draft",
                  "Share of the target's own tokens that were sampled without a draft, first tokens included", "share",
                  (Line("without", "--target", "completion_tokens - rounds - accepted", "completion_tokens - accepted",
                        area=True, fact="Tokens without a draft"),),
                  _NO_REQUEST, counts=("completion_tokens - accepted", "tokens of the target")),
            Chart("stream", "Trace stream", "Records per second: written for the trainer, and dropped", "rate",
                  (Line("written", "--accent", "traces_written"),
                   Line("dropped", "--bad", "traces_dropped", dash=True)),
                  "No traces in this time range. Each captured request writes one when it ends.", digits=2),
        ),
        tiles=(Tile("requests", "Requests", "{window:requests} in this time range, {total:failed} failed", "requests",
                    alarm="failed"),
               Tile("waiting", "Running / waiting", "of all replicas", gauges=("running", "waiting")),
               Tile("dropped", "Traces dropped", "{total:traces_written} written", "traces_dropped",
                    alarm="traces_dropped")),
    ),
}  # fmt: skip


_PAGES = {name: asdict(page) for name, page in PAGES.items()}
_LISTED = [{"key": row.key, "unit": row.unit, **asdict(row.listed)} for row in REPLICA if row.listed]
_BOUNDS = {row.key: row.bounds for row in REMEMBERED.values() if row.kind == "histogram"}


def display() -> dict[str, Any]:
    """Return the definitions of all pages as JSON, with the listed metrics and the bounds of histograms."""
    return {"pages": _PAGES, "listed": _LISTED, "bounds": _BOUNDS}
