"""The dashboard's charts and figures of metrics, which the pages draw as they are described here.

An expression names metrics by their keys: "prompt_tokens - cached_tokens". A metric with labels is summed over them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from serving.metrics.table import REMEMBERED, REPLICA

_NO_DRAFTS = "No round has drafted yet."
_NO_TRAFFIC = "No traffic yet: ask something in the Playground."
_NO_REQUEST = "No request in the time shown."


@dataclass(frozen=True)
class Line:
    """A line of a chart: the expression ``part``, divided by ``of`` where the kind of the chart says so.

    With a ``fact`` the page also lists the value over the whole window.
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
    """A chart over time.

    Attributes:
        kind: ``rate`` is per second; ``share`` and ``mean`` divide and draw few counts towards the window's mean;
            ``pace`` is the inverse of a mean; ``level`` is a gauge; ``quantiles`` are those of the histogram ``of``.
        least: the axis reaches at least from ``base`` to this; means are counted from ``base``.
        counts: expression and noun of what each value rests on.
        tile: title of a tile with the latest value, of at least ``enough`` in the denominator.
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
    """A tile with a counter's total, or the sum of gauges; ``{window:key}`` and ``{total:key}`` in a note are values.

    ``alarm`` is the counter that marks the note when it is above 0.
    """

    id: str
    title: str
    note: str
    total: str = ""
    gauges: tuple[str, ...] = ()
    alarm: str = ""


@dataclass(frozen=True)
class Breakdown:
    """Accepted of drafted tokens by a label, the one at ``place`` in a name; ``own`` leaves out other domains."""

    by: str
    part: str
    of: str
    place: int = 1
    own: bool = False


@dataclass(frozen=True)
class Page:
    """Figures of one page of the dashboard."""

    charts: tuple[Chart, ...]
    tiles: tuple[Tile, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    positions: Breakdown | None = None


def _latency(name: str, histogram: str, title: str, note: str, tile: bool = False) -> Chart:
    note = f"{note}, of 30 seconds each"
    return Chart(
        name, title, note, "quantiles", QUANTILES, _NO_REQUEST, least=0.001, of=histogram, tile=title if tile else ""
    )


PAGES: dict[str, Page] = {
    "overview": Page(
        charts=(
            Chart("acceptance", "Acceptance rate",
                  "Share of draft tokens that the target kept; few drafts are drawn towards the mean, with their range",
                  "share", (Line("acceptance", "--accent", "accepted", "drafted"),), _NO_DRAFTS,
                  counts=("drafted", "drafted"), tile="Acceptance rate", enough=500),
            Chart("length", "Mean acceptance length", "Tokens of a round that drafted, with the target's own", "mean",
                  (Line("length", "--accent", "accepted", "rounds"),), _NO_DRAFTS, digits=2, base=1, least=2,
                  counts=("rounds", "rounds"), tile="Mean acceptance length", enough=150),
            Chart("speed", "Decoding speed", "Tokens a second of an engine at work", "pace",
                  (Line("tokens/s", "--accent", "busy_seconds", "completion_tokens"),), _NO_TRAFFIC, least=10),
            Chart("tokens", "Tokens served", "Completion tokens a second, all replicas", "rate",
                  (Line("tokens/s", "--accent", "completion_tokens", area=True),), _NO_TRAFFIC, least=10),
        ),
        tiles=(Tile("load", "Running / waiting", "{total:requests} requests so far, {total:failed} failed",
                    gauges=("running", "waiting"), alarm="failed"),),
        breakdowns=(Breakdown("source", "source_accepted", "source_drafted"),
                    Breakdown("version", "version_accepted", "version_drafted", 2, own=True),
                    Breakdown("domain", "version_accepted", "version_drafted")),
        positions=Breakdown("position", "accepted_per_position", "rounds"),
    ),
    "traffic": Page(
        charts=(
            _latency("first", "time_to_first_token", "Time to first token",
                     "From the arrival of a request to its first token", tile=True),
            _latency("token", "inter_token", "Time between tokens",
                     "Between two rounds that gave a sequence tokens, however many came at once", tile=True),
            _latency("request", "request_time", "Time of a request", "From its arrival to its last token"),
            _latency("queue", "queue_time", "Wait for a slot", "Of finished sequences, while all slots were taken"),
            Chart("load", "Queue", "Requests that have a slot, and those that wait for one", "level",
                  (Line("running", "--accent", "running", area=True), Line("waiting", "--drafter", "waiting")),
                  "No replica has reported yet.", digits=1, least=4),
            Chart("rate", "Tokens", "A second, all replicas: read from prompts, found in the cache, written", "rate",
                  (Line("written", "--accent", "completion_tokens"),
                   Line("read", "--drafter", "prompt_tokens - cached_tokens"),
                   Line("cached", "--target", "cached_tokens", dash=True)), _NO_REQUEST, least=10),
            Chart("draft", "Size of drafts", "Tokens drafted in a round that drafted, and those of them that were kept",
                  "mean", (Line("drafted", "--accent", "drafted", "rounds", fact="Tokens drafted in each"),
                           Line("kept", "--drafter", "accepted", "rounds", fact="Tokens kept of each")),
                  _NO_DRAFTS, digits=1, least=4, counts=("rounds", "rounds")),
            Chart("plain", "Rounds without a draft",
                  "Share of tokens that the target drew without a draft, prompts' first tokens included", "share",
                  (Line("without", "--target", "completion_tokens - rounds - accepted", "completion_tokens - accepted",
                        area=True, fact="Draws without a draft"),),
                  _NO_REQUEST, counts=("completion_tokens - accepted", "draws")),
            Chart("stream", "Trace stream", "Records a second: written for the trainer, and dropped on the way", "rate",
                  (Line("written", "--accent", "traces_written"),
                   Line("dropped", "--bad", "traces_dropped", dash=True)),
                  "No trace was written in the time shown.", digits=2),
        ),
        tiles=(Tile("requests", "Requests", "{window:requests} in the time shown, {total:failed} failed", "requests",
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
    """The figures of the pages as JSON, with listed metrics and buckets."""
    return {"pages": _PAGES, "listed": _LISTED, "bounds": _BOUNDS}
