"""Live view of the demo, and its report and plot at the end."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.demo.measure import PROMPTS, HeldOutResult, ModeResult
from osd.cli.report import Plot, caption_of, write_plot
from osd.metrics import SpeculationCounts, acceptance_rate
from osd.runtime.machine import Machine
from osd.traffic.open_loop import Tally


@dataclass(frozen=True)
class MetricsSample:
    """Counters of the service, ``time`` seconds after the start of the traffic.

    Attributes:
        requests: finished requests of the client.
        speedup: measured speed-up over plain decoding: ``estimate``, and ``low`` and ``high`` where the 95 % interval
            is known; empty before the first estimate.
    """

    time: float
    counts: SpeculationCounts
    tokens: float
    version: int
    swaps: int
    stall: float
    written: int
    dropped: int
    requests: int = 0
    speedup: Mapping[str, float] = field(default_factory=dict)


_EIGHTHS = " ▁▂▃▄▅▆▇█"
_EMPTY = MetricsSample(0, SpeculationCounts(), 0, 0, 0, 0, 0, 0)


@dataclass
class DemoRun:
    """Course of a demo.

    Attributes:
        target: source of the target.
        seconds: planned seconds of traffic.
        tally: counts of the client.
        samples: counters of the service over time.
        trainer: last status of the trainer.
        started: start of the traffic, a time of ``time.monotonic``.
        first: drafter version in service at the start.
        last: drafter version in service at the end.
        trained: kind of the trained drafter.
    """

    target: str
    seconds: float
    tally: Tally = field(default_factory=Tally)
    samples: list[MetricsSample] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    first: int = 1
    last: int = 1
    trained: str = "eagle"

    @property
    def now(self) -> MetricsSample:
        """Last sample; zeros before the first sample."""
        return self.samples[-1] if self.samples else _EMPTY

    def acceptance(self, window: float = 10.0) -> list[tuple[float, float]]:
        """Return (time, acceptance rate over the last ``window`` seconds) of each sample with drafted tokens."""
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
        """Acceptance rate of the last seconds as text, "-" without drafts."""
        acceptance = self.acceptance()
        return f"{acceptance[-1][1]:.3f}" if acceptance else "-"

    def speed(self, window: float = 10.0) -> float:
        """Return the tokens per second over the last ``window`` seconds."""
        recent = [sample for sample in self.samples if self.now.time - sample.time <= window]
        if len(recent) < 2:
            return 0.0
        return (recent[-1].tokens - recent[0].tokens) / (recent[-1].time - recent[0].time)

    def swaps(self) -> list[MetricsSample]:
        """Return the first sample after each change of the version in service."""
        return [
            after
            for before, after in itertools.pairwise(self.samples)
            if before.version and after.version != before.version
        ]


def panel(demo: DemoRun) -> RenderableType:
    """Return the live view for a terminal."""
    remaining = max(0, demo.seconds - demo.now.time)
    table = Table.grid(padding=(0, 2))
    tally, trainer = demo.tally, demo.trainer
    loss = trainer.get("loss")
    table.add_row("traffic", f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed")
    table.add_row(
        "decoding", f"acceptance {demo.rate}, {demo.speed():.0f} tokens/s, drafter version {demo.now.version}"
    )
    table.add_row(
        "trainer",
        f"{trainer.get('state', 'starting')}, step {trainer.get('steps', 0)}"
        + (f", loss {loss:.3f}" if loss is not None else "")
        + f", {trainer.get('published', 0)} published, {trainer.get('rejected', 0)} rejected",
    )
    title = f"{int(remaining // 60)}:{int(remaining % 60):02d} left"
    return Panel(Group(table, Text(plot(demo, 66, 8))), title=title, width=80)


def line(demo: DemoRun) -> str:
    """Return the live view in one line."""
    return (
        f"{demo.now.time:5.0f} s  {demo.tally.finished}/{demo.tally.sent} requests  acceptance {demo.rate}  "
        f"{demo.speed():.0f} tokens/s  version {demo.now.version}  trainer {demo.trainer.get('state', 'starting')}"
    )


def plot(demo: DemoRun, width: int, height: int) -> str:
    """Return a plot of the acceptance rate over the time of the traffic."""
    head = "     acceptance rate (^ a swap)"
    swaps = [sample.time for sample in demo.swaps()]
    return f"{head}\n{chart(demo.acceptance(), swaps, demo.seconds, width, height)}"


def show(console: Console, demo: DemoRun, held_out: HeldOutResult) -> None:
    """Print the plot and the table of the measurement."""
    console.print(Text(plot(demo, min(console.width, 100) - 8, 10)))
    table = Table("held-out prompts", "tokens/s", "x plain", "acceptance rate", "mean acceptance length")
    plain = held_out.plain
    table.add_row("plain decoding", f"{plain:.1f}", "1.00", "", "")
    for name, figures in (
        (f"first drafter (version {demo.first})", held_out.first),
        (f"last drafter (version {demo.last})", held_out.last),
        ("recall after the first minute", held_out.first_minute),
        ("recall after the whole traffic", held_out.recall),
        (f"recall with version {demo.last}", held_out.mixed),
    ):
        if figures is not None:
            speed = figures.tokens_per_second
            row = [name, f"{speed:.1f}", f"{speed / plain:.2f}"]
            counts = figures.counts
            table.add_row(*row, f"{counts.acceptance_rate:.3f}", f"{counts.mean_acceptance_length:.2f}")
    console.print(table)
    now, trainer = demo.now, demo.trainer
    console.print(
        f"{demo.tally.sent} requests, {demo.tally.failed} failed, {demo.tally.tokens} tokens; "
        f"{trainer.get('published', 0)} versions published, {trainer.get('rejected', 0)} rejected; "
        f"{now.swaps} swaps, longest stall {now.stall * 1e3:.1f} ms; "
        f"greedy output {'identical' if held_out.greedy_identical else 'NOT identical'} with and without speculation"
    )


def write(path: Path, demo: DemoRun, held_out: HeldOutResult) -> None:
    """Write the figures to a JSON file."""
    now = demo.now
    figures = {
        "target": demo.target,
        "requests": demo.tally.sent,
        "failed": demo.tally.failed,
        "tokens": demo.tally.tokens,
        "versions_published": demo.trainer.get("published", 0),
        "versions_rejected": demo.trainer.get("rejected", 0),
        "swaps": now.swaps,
        "swap_stall_ms_max": now.stall * 1e3,
        "traces": {"written": now.written, "trained": demo.trainer.get("trained", 0), "dropped": now.dropped},
        "held_out": {
            "plain": {"tokens_per_second": held_out.plain},
            "first": {"version": demo.first, **held_out.first.figures()},
            "last": {"version": demo.last, **held_out.last.figures()},
            **{name: result.figures() for name, result in _recall_results(demo, held_out).items()},
            "greedy_identical": held_out.greedy_identical,
        },
        "first_minute": None if held_out.first_minute is None else held_out.first_minute.figures(),
    }
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, demo: DemoRun, held_out: HeldOutResult, machine: Machine) -> None:
    """Write an SVG file with acceptance and speed-up over the requests served, and with marks of the swaps."""
    requests = {sample.time: sample.requests for sample in demo.samples}
    marks = [(sample.requests, f"v{sample.version}") for sample in demo.swaps()]
    # Of the samples between two requests the last counts.
    acceptance = list({requests[moment]: rate for moment, rate in demo.acceptance()}.items())
    speedups = {sample.requests: sample.speedup for sample in demo.samples if sample.speedup}
    estimates = [(served, speedup["estimate"]) for served, speedup in speedups.items()]
    ranges = [(served, now["low"], now["high"]) for served, now in speedups.items() if {"low", "high"} <= now.keys()]
    top = math.ceil(3 * max([1.0, *(estimate for _, estimate in estimates)])) / 2
    plain = [(0.0, 1.0), (float(demo.now.requests), 1.0)]
    title = "speed-up over plain decoding" if estimates else "speed-up over plain decoding: not measured in this time"
    plots = [
        Plot("acceptance rate", {"accepted / drafted": acceptance}, marks, unit="requests"),
        Plot(title, {"measured": estimates, "plain decoding": plain}, marks, unit="requests",
             bands={"measured": ranges}, top=top),
    ]  # fmt: skip
    write_plot(path, plots, [*_caption(demo, machine), _held_out_line(demo, held_out)])


def _caption(demo: DemoRun, machine: Machine) -> list[str]:
    """Return the caption of the plot, in lines."""
    return [
        caption_of(demo.target, machine),
        "Acceptance rate: over the last 10 seconds. Vertical lines: a new version of the drafter is swapped in.",
        "Speed-up: measured while serving, at the same load; the area is its 95 % interval, where it is known.",
    ]


def _held_out_line(demo: DemoRun, held_out: HeldOutResult) -> str:
    """Return the speed-up on held-out prompts as a line of the caption."""
    results = {f"version {demo.last}": held_out.last, f"recall with version {demo.last}": held_out.mixed}
    speeds = {name: result.tokens_per_second / held_out.plain for name, result in results.items() if result}
    text = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    return f"Speed-up on {PROMPTS} held-out prompts, greedy, median: {text}."


def next_steps(url: str) -> list[str]:
    """Return three lines that say what to do after the demo; ``url`` is the address of the service."""
    program = "osd" if shutil.which("osd") else sys.argv[0]
    steps = {
        f"{program} up": f"serve your own requests; the dashboard is at {url}/dashboard",
        f"{program} up HuggingFaceTB/SmolLM2-1.7B-Instruct": "serve your model: a hub id, a directory or a .gguf file",
        f"{program} learn --capture": "learn from your vLLM; docs/vllm-learning.md has the options of vLLM",
    }
    width = max(map(len, steps))
    return [f"{command:{width}}  {purpose}" for command, purpose in steps.items()]


def _recall_results(demo: DemoRun, held_out: HeldOutResult) -> dict[str, ModeResult]:
    """Return the results of recall, of the last version, and of both together; empty without recall."""
    if held_out.recall is None or held_out.mixed is None:
        return {}
    return {"recall": held_out.recall, demo.trained: held_out.last, "mixed": held_out.mixed}


def chart(
    points: Sequence[tuple[float, float]], marks: Sequence[float], seconds: float, width: int, height: int
) -> str:
    """Return a bar chart as text, with a line of ``^`` marks below.

    Args:
        points: (time in seconds, value between 0 and 1). A column shows its last point; a column without points
            repeats the previous column.
        marks: times of the marks in seconds.
        seconds: time that the whole width covers.
        width: number of columns.
        height: number of lines of the bars.
    """
    column = width / max(seconds, 1e-9)
    levels = [0] * width
    filled = 0
    for moment, value in points:
        position = min(int(moment * column), width - 1)
        level = round(max(0.0, min(1.0, value)) * 8 * height)
        for gap in range(filled, position):
            levels[gap] = levels[filled - 1] if filled else 0
        levels[position], filled = level, position + 1
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
