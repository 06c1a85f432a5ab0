"""Tokens per second of the engine in two ways, taking turns: drafting beside plain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.adaptation.lab import Lab
from benchmarks.streams import seconds_of
from osd.capture.trace import Trace
from osd.drafters.base import Drafter
from osd.engine.engine import Engine
from osd.engine.request import Request, Sampling
from serving.replica import make_engine
from serving.versions import Start

Report = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How requests are sent, and tokens per second of each turn."""

    name: str
    speculate: bool
    speeds: list[float]


@dataclass(frozen=True)
class Served:
    """Two ways to send the same prompts."""

    one: Way
    other: Way

    def ratio(self) -> tuple[float, float, float]:
        """(median, least, largest) of one / other within a turn."""
        ratios = [mine / theirs for mine, theirs in zip(self.one.speeds, self.other.speeds, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def served(lab: Lab, drafter: Drafter, traces: Sequence[Trace], turns: int, report: Report) -> Served:
    """Send the prompts of ``traces`` with governed drafts, and plainly."""
    growth = lab.settings.growth.model_copy(update={"governed": True})
    settings = lab.settings.model_copy(update={"growth": growth})
    engine = make_engine(settings, lab.studio.directory, lab.studio.tokenizer, Start(drafter, 1), None)
    ways = Served(Way("drafting", True, []), Way("plain", False, []))
    return _compare(engine, lab, traces, ways, turns, report)


def _compare(engine: Engine, lab: Lab, traces: Sequence[Trace], ways: Served, turns: int, report: Report) -> Served:
    """Send all prompts at once, once in each way a turn; another one begins each time, and a first turn warms up."""
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces]
    engine.start()
    try:
        for turn in range(turns + 1):
            report(f"{ways.one.name} and {ways.other.name}: turn {turn} of {turns}")
            for way in (ways.one, ways.other) if turn % 2 else (ways.other, ways.one):
                speed = _send(engine, prompts, lab.size.tokens, way)
                if turn:
                    way.speeds.append(speed)
    finally:
        engine.stop()
    return ways


def _send(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, way: Way) -> float:
    requests = [
        Request(str(index), prompt, tokens, Sampling(temperature=0), ignore_eos=True, speculate=way.speculate)
        for index, prompt in enumerate(prompts)
    ]
    return len(prompts) * tokens / seconds_of(engine, requests)
