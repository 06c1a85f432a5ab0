"""The experiments' results as tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.adaptation.adapt import FROZEN, OFFLINE, ONLINE, PAPER, WAYS, Adapted
from benchmarks.adaptation.curves import SHARES, Rise, Spread, windows
from benchmarks.adaptation.offline_acceptance import Counts, total
from benchmarks.adaptation.report import Plot, Table
from benchmarks.adaptation.served import Served

PLOT_WINDOW = 20
"""Records of a point in a plot."""


def adapt_tables(found: Sequence[Adapted], per: int) -> list[Table]:
    """Of one kind on one stream, over seeds: the curve, the end, and how soon."""
    one = found[0]
    rows = []
    ends = [end for end, _ in windows(one.arriving[ONLINE], per)]
    for index, end in enumerate(ends):
        cells = [_spread([windows(run.arriving[way], per)[index][1].agreement for run in found]) for way in WAYS]
        rows.append((f"to {end}", *cells))
    curve = Table(f"{one.stream}, {one.kind}: accepted / tested of each {per} records", ("records", *WAYS), rows)
    rows = []
    for way in WAYS:
        counts = [total(run.unseen[way]) for run in found]
        work = [run.work[way] for run in found]
        rows.append(
            (
                way,
                _spread([c.agreement for c in counts]),
                _spread([c.acceptance for c in counts]),
                _spread([c.acceptance_length for c in counts]),
                str(round(sum(w.positions for w in work) / len(work))),
                f"{sum(w.cpu_seconds for w in work) / len(work):.0f}",
            )
        )
    columns = ("", "accepted / tested", "acceptance rate", "acceptance length", "positions trained", "CPU seconds")
    unseen = Table(f"{one.stream}, {one.kind}: on {len(one.unseen[ONLINE])} unseen records", columns, rows)
    rises = [Rise.of(run.arriving[ONLINE], max(len(run.arriving[ONLINE]) // 15, 8)) for run in found]
    rows = [("here", *_rise(found, rises))]
    if one.stream in PAPER:
        frozen, begin, last, offline, records = PAPER[one.stream]
        figures = (f"{frozen:.3f}", f"{begin:.3f}", f"{last:.3f}", f"{offline:.3f}", *(str(n) for n in records))
        rows.append(("paper", *figures))
    columns = ("", FROZEN, "online, first", "last", OFFLINE, *(f"records to {share:.0%}" for share in SHARES))
    return [curve, unseen, Table(f"{one.stream}, {one.kind}: beside the paper, accepted / tested", columns, rows)]


def _rise(found: Sequence[Adapted], rises: Sequence[Rise]) -> list[str]:
    frozen, offline = (
        _spread([total(run.arriving[way]).agreement for run in found]) for way in (FROZEN, OFFLINE)
    )  # every record, as the paper measures
    cells = [frozen, _spread([rise.first for rise in rises]), _spread([rise.last for rise in rises]), offline]
    for index in range(len(SHARES)):
        reached = [rise.records[index] for rise in rises]
        cells.append(" ".join("-" if records is None else str(records) for records in reached))
    return cells


def adapt_plot(one: Adapted) -> Plot:
    """The curves of one run."""
    return Plot(f"{one.stream}, {one.kind}: accepted / tested", {way: line(one.arriving[way]) for way in WAYS})


def served_table(title: str, found: Served) -> Table:
    """Tokens per second of two ways, and their ratio within a turn."""
    rows = [
        (way.name, f"{statistics.median(way.speeds):.1f}", f"{min(way.speeds):.1f} to {max(way.speeds):.1f}")
        for way in (found.one, found.other)
    ]
    middle, least, most = found.ratio()
    rows.append((f"{found.one.name} / {found.other.name}", f"{middle:.3f}", f"{least:.2f} to {most:.2f}"))
    return Table(title, ("tokens/s", "median", "spread"), rows)


def line(counts: Sequence[Counts]) -> list[tuple[float, float]]:
    """Agreement of each few records, at their middle."""
    found = windows(counts, PLOT_WINDOW)
    begins = [0, *(end for end, _ in found)]
    return [((begin + end) / 2, part.agreement) for begin, (end, part) in zip(begins, found, strict=False)]


def _spread(values: Sequence[float]) -> str:
    return str(Spread(tuple(values)))
