"""Kinds of drafters side by side: tables, and their acceptance over what their training took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.adaptation.adapt import ONLINE, WAYS
from benchmarks.adaptation.curves import windows
from benchmarks.adaptation.kinds import TEMPERATURES, Decoded, Learnt
from benchmarks.adaptation.report import Plot, Table
from benchmarks.adaptation.tables import PLOT_WINDOW

_DEEPEST = 4
"""Depths that tables show."""


def learnt_table(stream: str, unseen: int, found: Sequence[Learnt]) -> Table:
    """A row for what each kind learnt in each way."""
    depths = [f"at {depth}" for depth in range(1, _DEEPEST + 1)]
    columns = ("", "learnt", "all", *depths, "length", "params", "MB", "CPU s")
    rows = [
        (
            one.kind,
            one.way,
            f"{one.unseen.agreement:.3f}",
            *_shares([accepted / tested for tested, accepted in one.depths], _DEEPEST, 3),
            f"{one.unseen.acceptance_length:.2f}",
            _many(one.parameters),
            f"{one.bytes / 1e6:.2f}",
            f"{one.work.cpu_seconds:.0f}",
        )
        for one in found
    ]
    return Table(f"{stream}: accepted / tested of chains on {unseen} unseen records, by depth", columns, rows)


def decoded_tables(stream: str, found: Mapping[str, Sequence[Decoded]]) -> list[Table]:
    """One for each temperature, with a row for each kind, what it learnt, and whether it has recall beside it."""
    depths = [f"{depth}+" for depth in range(1, _DEEPEST)]
    columns = ("", "learnt", "recall", "speed-up", "tokens", "rows", "calls", "length", *depths)
    tables = []
    for temperature in TEMPERATURES:
        rows = [
            (
                kind if one.learnt else "-",
                one.learnt or "-",
                "yes" if one.with_recall else "no",
                one.speedup.text(),
                f"{one.tokens:.2f}",
                f"{one.rows:.2f}",
                f"{one.calls:.2f}",
                f"{one.length:.2f}",
                *_shares(one.depths, _DEEPEST - 1, 2),
            )
            for kind, ways in found.items()
            for one in ways
            if one.temperature == temperature
        ]
        how = f"temperature {temperature:g}" if temperature else "greedy"
        tables.append(Table(f"{stream}, {how}: beside plain decoding, and of a forward of the target", columns, rows))
    return tables


def beside_recall_table(stream: str, found: Mapping[str, Sequence[Decoded]]) -> Table:
    """The speed of each kind beside recall in that of recall alone, for each temperature and each way to learn."""
    rows = [
        (kind, f"{temperature:g}", *("" if one.of_recall is None else one.of_recall.text() for one in mine))
        for temperature in TEMPERATURES
        for kind, ways in found.items()
        if (mine := [one for one in ways if one.temperature == temperature and one.with_recall and one.learnt])
    ]
    return Table(f"{stream}: speed beside recall, of recall alone", ("", "temperature", *WAYS), rows)


def kinds_plot(stream: str, found: Sequence[Learnt]) -> Plot:
    """What online drafters accepted as they learnt, and as dots what each way ended with on unseen records."""
    lines, dots = {}, {}
    for one in found:
        dots.setdefault(one.kind, []).append((one.work.cpu_seconds, one.unseen.agreement))
        if one.way == ONLINE:
            ends = [(end, part.agreement) for end, part in windows(one.arriving, PLOT_WINDOW)]
            lines[one.kind] = [(one.spent[end - 1], share) for end, share in ends]
    return Plot(f"{stream}: accepted / tested", lines, dots=dots, unit="CPU seconds of training")


NOTES = (
    "Frozen was distilled on the first tenth, offline on all records that arrive, online learnt from each when it "
    "came. Speed-ups are medians (least to largest) beside plain decoding of the same prompt, in the same turn. "
    "Tokens, rows and calls of the drafter are of each forward of the target, drafted for or not; length is of rounds "
    "that drafted, of which the last columns say how many accepted at least so many tokens.",
)


def _shares(values: Sequence[float], count: int, digits: int) -> list[str]:
    return [f"{values[place]:.{digits}f}" if place < len(values) else "" for place in range(count)]


def _many(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"
