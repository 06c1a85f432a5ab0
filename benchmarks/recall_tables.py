"""The tables of ``osd bench recall``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table as Grid

from benchmarks.nodes import BINS, Calibration, Tally
from benchmarks.recall import MIXED, STREAM, UNSEEN
from benchmarks.recall_figures import Block, Found, Gain
from benchmarks.report import columns
from osd.recall.backends import ENTRY_BYTES


def tables(found: Found) -> RenderableType:
    """What was measured, on the machine that is named first."""
    parts: list[RenderableType] = [str(found.machine)]
    parts += [_gains("the first requests", found.first), _gains("unseen prompts", found.unseen)]
    for name, learner in found.learners.items():
        drafts = learner.unseen
        kinds = ("longest context", drafts.contexts), ("depth", drafts.depths), ("source", drafts.sources)
        parts += [_tallies(f"{name}, unseen, by {kind}", mine) for kind, mine in kinds]
        phases = (STREAM, learner.stream), (UNSEEN, learner.unseen)
        parts += [_calibration(f"{name}, {phase}", mine.calibration) for phase, mine in phases]
        parts.append(_curve(f"{name}, up to request", learner.curve))
    if MIXED in found.learners:
        parts.append(f"the trained drafter was asked for {found.learners[MIXED].unseen.asked:.3f} of the unseen drafts")
    if (both := found.added) is not None:
        mean = f"{both.geometric_mean:.3f} (standard error {both.error:.3f}, median {both.median:.3f})"
        parts.append(f"with it {both.waves} waves of unseen prompts took {mean} of their time with recall alone")
    return Group(*parts, *_costs(found))


def _gains(title: str, found: Sequence[Gain]) -> Grid:
    names = ("waves", "x plain", "quartiles", "tokens/s", "tokens/round", "tokens/forward", "drafted/round", "kept")
    grid = columns(title, *names, "ledger off by")
    for gain in found:
        up, speed = gain.speedup, gain.tokens_per_second.median
        cells = [str(gain.waves), up.text(), f"{up.lower:.2f} to {up.upper:.2f}", f"{speed:.1f}"]
        cells += [f"{gain.mean_acceptance_length:.2f}", f"{gain.tokens_per_forward:.2f}"]
        off = "" if gain.ledger_error is None else f"{gain.ledger_error:+.3f}"
        cells += [f"{gain.drafted_per_round:.1f}", f"{gain.acceptance_rate:.2f}", off]
        grid.add_row(gain.way, *cells)
    return grid


def _tallies(title: str, found: dict[str, Tally]) -> Grid:
    grid = columns(title, "drafted", "tested", "kept", "of drafted", "of tested")
    for name, one in found.items():
        shares = (f"{one.kept / count:.2f}" if count else "" for count in (one.drafted, one.tested))
        grid.add_row(name, *map(str, (one.drafted, one.tested, one.kept)), *shares)
    return grid


def _calibration(title: str, found: Calibration) -> Grid:
    grid = columns(f"{title}: {found.tested} tested, error {found.error:.4f}", "nodes", "chance", "kept")
    for number, one in enumerate(found.bins):
        cells = (str(one.tested), f"{one.chance:.3f}", f"{one.kept:.3f}") if one else ("0", "", "")
        grid.add_row(f"from {number / BINS:.1f}", *cells)
    return grid


def _curve(title: str, blocks: Sequence[Block]) -> Grid:
    grid = columns(title, "tokens/round", "tokens/forward")
    for block in blocks:
        grid.add_row(str(block.until), f"{block.mean_acceptance_length:.2f}", f"{block.tokens_per_forward:.2f}")
    return grid


def _costs(found: Found) -> list[str]:
    used, room = (count * ENTRY_BYTES / 1e6 for count in (found.used, found.entries))
    lines = [f"{found.used} of {found.entries} entries, {used:.1f} of {room:.1f} MB"]
    if found.microseconds is not None:
        for name, took in (("query", found.microseconds.query), ("update", found.microseconds.update)):
            lines.append(f"{name}, microseconds: {took.text()}, quartiles {took.lower:.2f} to {took.upper:.2f}")
    forwards = ", ".join(f"{rows} rows {cost:.2f}" for rows, cost in found.forwards.items())
    return [*lines, f"forwards, in those of one row: {forwards}"]
