"""The tables of ``osd analyze refusals``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table as Grid

from benchmarks.report import columns
from osd.analysis.refusals.answers import PLAIN
from osd.analysis.refusals.comparison import Found
from osd.analysis.refusals.labels import LABELS
from osd.analysis.refusals.paired import Rate
from osd.analysis.refusals.prompts import Prompt


def tables(prompts: Sequence[Prompt], found: Sequence[Found]) -> Iterator[Grid]:
    """What became of each way, then how often each group of prompts is refused."""
    yield _ways(prompts, found)
    yield _groups(found)


def _ways(prompts: Sequence[Prompt], found: Sequence[Found]) -> Grid:
    names = "identical", "near ties", "other", "flips", "by chance", "p", "lost", "gained", "p", "accepted", "drafted"
    grid = columns("greedy, then sampled answers", *names, *LABELS, title="beside plain decoding")
    for one in found:
        others = len(one.differences) - one.ties
        greedy = [one.greedy - len(one.differences), one.ties, others]
        pairs = one.pairs
        sampled = [""] * 6
        if pairs is not None:
            flips = [str(pairs.flips), str(pairs.by_chance), f"{pairs.p_flips:.3g}"]
            sampled = [*flips, str(pairs.lost), str(pairs.gained), f"{pairs.p_refusals:.3g}"]
        rates = one.rates[0].labels
        shares = [f"{rates[label].share:.3f}" for label in LABELS]
        grid.add_row(one.way, *map(str, greedy), *sampled, str(one.accepted), str(one.drafted), *shares)
        pids = {flip.pid: f", from {flip.plain} to {flip.other}" for flip in one.greedy_flips}
        for difference in one.differences:
            pid = prompts[difference.prompt].pid
            grid.add_row(f"  pid {pid}, {difference}{pids.get(pid, '')}")
    return grid


def _groups(found: Sequence[Found]) -> Grid:
    plain = next(one for one in found if one.way == PLAIN)
    grid = columns("share of labels", "prompts", *LABELS, "GOOD in other ways", title="plain decoding, by group")
    for place, rates in enumerate(plain.rates):
        group = escape(f"{rates.group.field} {rates.group.value}".strip())
        others = [one.rates[place].labels["GOOD"].share for one in found if one is not plain]
        between = f"{min(others):.3f} to {max(others):.3f}"
        grid.add_row(group, str(rates.prompts), *(_rate(rates.labels[label]) for label in LABELS), between)
    return grid


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3f} ({rate.low:.3f} to {rate.high:.3f})"
