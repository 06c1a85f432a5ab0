"""What the demo shows while it runs and when it ends."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.demo.measure import HeldOut, Run
from osd.metrics import SpeculationCounts, acceptance_rate
from osd.traffic.open_loop import Tally


@dataclass(frozen=True)
class Sample:
    """The service's counters at one moment, ``time`` seconds after the traffic began."""

    time: float
    counts: SpeculationCounts
    tokens: float
    version: int
    swaps: int
    stall: float
    written: int
    dropped: int


_EIGHTHS = " ▁▂▃▄▅▆▇█"
_NOTHING = Sample(0, SpeculationCounts(), 0, 0, 0, 0, 0, 0)


@dataclass
class Story:
    """All that happened in the run; ``seconds`` of traffic were planned. ``trained`` is the kind of the drafter."""

    target: str
    seconds: float
    tally: Tally = field(default_factory=Tally)
    samples: list[Sample] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    first: int = 1
    last: int = 1
    trained: str = "eagle"

    @property
    def now(self) -> Sample:
        """The last sample."""
        return self.samples[-1] if self.samples else _NOTHING

    def acceptance(self, window: float = 10.0) -> list[tuple[float, float]]:
        """(time, acceptance rate of the ``window`` seconds before), where anything was drafted."""
        points = []
        start = 0
        for sample in self.samples:
            while sample.time - self.samples[start].time > window:
                start += 1
            now, then = sample.counts, self.samples[start].counts
            if now.drafted > then.drafted:
                rate = acceptance_rate(now.accepted - then.accepted, now.drafted - then.drafted)
                points.append((sample.time, rate))
        return points

    @property
    def rate(self) -> str:
        """The acceptance rate of the last seconds, for people."""
        acceptance = self.acceptance()
        return f"{acceptance[-1][1]:.3f}" if acceptance else "-"

    def speed(self, window: float = 10.0) -> float:
        """Tokens per second of the last ``window`` seconds."""
        recent = [sample for sample in self.samples if self.now.time - sample.time <= window]
        if len(recent) < 2:
            return 0.0
        return (recent[-1].tokens - recent[0].tokens) / (recent[-1].time - recent[0].time)

    def swap_times(self) -> list[float]:
        """When the version in service changed."""
        return [two.time for one, two in itertools.pairwise(self.samples) if one.version and two.version != one.version]


def panel(story: Story) -> RenderableType:
    """The live view."""
    left = max(0, story.seconds - story.now.time)
    table = Table.grid(padding=(0, 2))
    tally, trainer = story.tally, story.trainer
    loss = trainer.get("loss")
    table.add_row("traffic", f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed")
    table.add_row(
        "decoding", f"acceptance {story.rate}, {story.speed():.0f} tokens/s, drafter version {story.now.version}"
    )
    table.add_row(
        "trainer",
        f"{trainer.get('state', 'starting')}, step {trainer.get('steps', 0)}"
        + (f", loss {loss:.3f}" if loss is not None else "")
        + f", {trainer.get('published', 0)} published, {trainer.get('rejected', 0)} rejected",
    )
    title = f"{int(left // 60)}:{int(left % 60):02d} left"
    return Panel(Group(table, Text(plot(story, 66, 8))), title=title, width=80)


def line(story: Story) -> str:
    """The live view in one line."""
    return (
        f"{story.now.time:5.0f} s  {story.tally.finished}/{story.tally.sent} requests  acceptance {story.rate}  "
        f"{story.speed():.0f} tokens/s  version {story.now.version}  trainer {story.trainer.get('state', 'starting')}"
    )


def plot(story: Story, width: int, height: int) -> str:
    """Acceptance over the time of the traffic."""
    head = "     acceptance rate (^ a swap)"
    return f"{head}\n{chart(story.acceptance(), story.swap_times(), story.seconds, width, height)}"


def show(console: Console, story: Story, held_out: HeldOut) -> None:
    """Print the plot and the table of what was measured."""
    console.print(Text(plot(story, min(console.width, 100) - 8, 10)))
    table = Table("held-out prompts", "tokens/s", "x plain", "acceptance rate", "mean acceptance length")
    plain = held_out.plain
    table.add_row("plain decoding", f"{plain:.1f}", "1.00", "", "")
    for name, figures in (
        (f"first drafter (version {story.first})", held_out.first),
        (f"last drafter (version {story.last})", held_out.last),
        ("recall, after the first minute", held_out.first_minute),
        ("recall, after all of it", held_out.recall),
        (f"recall with version {story.last}", held_out.mixed),
    ):
        if figures is not None:
            speed = figures.tokens_per_second
            row = [name, f"{speed:.1f}", f"{speed / plain:.2f}"]
            counts = figures.counts
            table.add_row(*row, f"{counts.acceptance_rate:.3f}", f"{counts.mean_acceptance_length:.2f}")
    console.print(table)
    now, trainer = story.now, story.trainer
    console.print(
        f"{story.tally.sent} requests, {story.tally.failed} failed, {story.tally.tokens} tokens; "
        f"{trainer.get('published', 0)} versions published, {trainer.get('rejected', 0)} rejected; "
        f"{now.swaps} swaps, longest stall {now.stall * 1e3:.1f} ms; "
        f"greedy output {'identical' if held_out.greedy_identical else 'NOT identical'} with and without speculation"
    )


def write(path: Path, story: Story, held_out: HeldOut) -> None:
    """Write the figures as JSON."""
    now = story.now
    figures = {
        "target": story.target,
        "requests": story.tally.sent,
        "failed": story.tally.failed,
        "tokens": story.tally.tokens,
        "versions_published": story.trainer.get("published", 0),
        "versions_rejected": story.trainer.get("rejected", 0),
        "swaps": now.swaps,
        "swap_stall_ms_max": now.stall * 1e3,
        "traces": {"written": now.written, "trained": story.trainer.get("trained", 0), "dropped": now.dropped},
        "held_out": {
            "plain": {"tokens_per_second": held_out.plain},
            "first": {"version": story.first, **held_out.first.figures()},
            "last": {"version": story.last, **held_out.last.figures()},
            **{name: run.figures() for name, run in _recalling(story, held_out).items()},
            "greedy_identical": held_out.greedy_identical,
        },
        "first_minute": None if held_out.first_minute is None else held_out.first_minute.figures(),
    }
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _recalling(story: Story, held_out: HeldOut) -> dict[str, Run]:
    """What recall did alone, what the trained drafter of the last version did, and both together."""
    if held_out.recall is None or held_out.mixed is None:
        return {}
    return {"recall": held_out.recall, story.trained: held_out.last, "mixed": held_out.mixed}


def chart(
    points: Sequence[tuple[float, float]], marks: Sequence[float], seconds: float, width: int, height: int
) -> str:
    """Columns for ``points``, times and values between 0 and 1, and under them a ``^`` for the time of each mark.

    The last point of a column counts, and a column without any repeats the one before; the whole width is ``seconds``.
    """
    column = width / max(seconds, 1e-9)
    levels = [0] * width
    filled = 0
    for moment, value in points:
        place = min(int(moment * column), width - 1)
        level = round(max(0.0, min(1.0, value)) * 8 * height)
        for between in range(filled, place):
            levels[between] = levels[filled - 1] if filled else 0
        levels[place], filled = level, place + 1
    lines = []
    for line in reversed(range(height)):
        label = f"{(line + 1) / height:4.2f} " if line % 2 == (height - 1) % 2 else "     "
        lines.append(label + "".join(_EIGHTHS[max(0, min(8, level - 8 * line))] for level in levels).rstrip())
    under = [" "] * width
    for mark in marks:
        under[min(int(mark * column), width - 1)] = "^"
    lines.append("     " + "".join(under).rstrip())
    lines.append(f"     0 s{f'{seconds:.0f} s':>{width - 3}}")
    return "\n".join(lines)
