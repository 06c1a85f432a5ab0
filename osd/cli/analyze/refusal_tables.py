"""The tables of ``osd analyze refusals``."""

from __future__ import annotations

from collections.abc import Sequence

from osd.analysis.refusals.answers import PLAIN
from osd.analysis.refusals.comparison import Found
from osd.analysis.refusals.labels import LABELS
from osd.analysis.refusals.paired import Rate
from osd.analysis.refusals.prompts import Prompt
from osd.cli.report import Table


def tables(prompts: Sequence[Prompt], found: Sequence[Found]) -> list[Table]:
    """Make a table of the ways, and one of how often each group of prompts is refused."""
    return [_ways(prompts, found), _groups(found)]


def _ways(prompts: Sequence[Prompt], found: Sequence[Found]) -> Table:
    names = "identical", "near ties", "other", "flips", "by chance", "p", "lost", "gained", "p", "accepted", "drafted"
    rows: list[tuple[str, ...]] = []
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
        rows.append((one.way, *map(str, greedy), *sampled, str(one.accepted), str(one.drafted), *shares))
        pids = {flip.pid: f", from {flip.plain} to {flip.other}" for flip in one.greedy_flips}
        for difference in one.differences:
            pid = prompts[difference.prompt].pid
            rows.append((f"  pid {pid}, {difference}{pids.get(pid, '')}",))
    return Table("beside plain decoding", ("greedy, then sampled answers", *names, *LABELS), rows)


def _groups(found: Sequence[Found]) -> Table:
    plain = next(one for one in found if one.way == PLAIN)
    rows: list[tuple[str, ...]] = []
    for place, rates in enumerate(plain.rates):
        group = f"{rates.group.field} {rates.group.value}".strip()
        others = [one.rates[place].labels["GOOD"].share for one in found if one is not plain]
        between = f"{min(others):.3f} to {max(others):.3f}"
        rows.append((group, str(rates.prompts), *(_rate(rates.labels[label]) for label in LABELS), between))
    return Table("plain decoding, by group", ("share of labels", "prompts", *LABELS, "GOOD in other ways"), rows)


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3f} ({rate.low:.3f} to {rate.high:.3f})"
