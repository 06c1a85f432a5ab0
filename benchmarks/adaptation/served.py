"""Tokens per second of the engine in two ways, taking turns: drafting beside plain, and captured beside not."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.adaptation.experiment import Experiment
from benchmarks.pair import BenchError, reading_anew
from benchmarks.streams import seconds_of
from osd.capture.server import open_redis
from osd.capture.trace import Trace
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.drafters.base import Drafter
from osd.engine.build import Start, make_engine
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams

_WRITE_SECONDS = 60.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How requests are sent, and tokens per second of each turn."""

    name: str
    speculate: bool
    capture: bool
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


@dataclass(frozen=True)
class Captured:
    """Decoding with and without capture, and the ``traces`` written and dropped meanwhile."""

    speeds: Served
    traces: dict[str, int]


def served(experiment: Experiment, drafter: Drafter, traces: Sequence[Trace], turns: int, report: Report) -> Served:
    """Send the prompts of ``traces`` with governed drafts, and plainly."""
    growth = experiment.settings.growth.model_copy(update={"governed": True})
    engine = _engine(experiment.settings.model_copy(update={"growth": growth}), experiment, drafter, None)
    ways = Served(Way("drafting", True, False, []), Way("plain", False, False, []))
    return _compare(engine, experiment, traces, ways, turns, report)


def captured(experiment: Experiment, drafter: Drafter, traces: Sequence[Trace], turns: int, report: Report) -> Captured:
    """Send the prompts of ``traces`` with capture to a real Redis, and without.

    What is captured is over when the last record is written, so that the writer's thread is charged as well.

    Raises:
        osd.capture.server.RedisError: there is no Redis.
        BenchError: records were neither written nor counted as dropped.
    """
    redis = open_redis(experiment.settings)
    pieces = math.ceil(experiment.size.tokens / experiment.settings.capture.segment)
    due = 0
    try:
        writer = TraceWriter(redis.url, experiment.settings.capture)
        try:
            engine = _engine(experiment.settings, experiment, drafter, writer)
            ways = Served(Way("with capture", True, True, []), Way("without", True, False, []))

            def finish(way: Way) -> None:
                nonlocal due
                due += len(traces) * pieces * way.capture
                deadline = time.monotonic() + _WRITE_SECONDS
                while sum(writer.counters().values()) < due:
                    if time.monotonic() > deadline:
                        raise BenchError(f"of {due} records {writer.counters()} are accounted for")
                    time.sleep(0.001)

            found = _compare(engine, experiment, traces, ways, turns, report, finish)
        finally:
            writer.close()
        return Captured(found, writer.counters())
    finally:
        redis.close()


def _engine(settings: Settings, experiment: Experiment, drafter: Drafter, writer: TraceWriter | None) -> Engine:
    return make_engine(
        reading_anew(settings), experiment.setup.directory, experiment.setup.tokenizer, Start(drafter, 1), writer
    )


def _compare(
    engine: Engine,
    experiment: Experiment,
    traces: Sequence[Trace],
    ways: Served,
    turns: int,
    report: Report,
    finish: Callable[[Way], None] = lambda way: None,
) -> Served:
    """Send all prompts at once, once in each way a turn; another one begins each time, and a first turn warms up.

    A way's time ends when ``finish`` returns.
    """
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces]
    engine.start()
    try:
        for turn in range(turns + 1):
            report(f"{ways.one.name} and {ways.other.name}: turn {turn} of {turns}")
            for way in (ways.one, ways.other) if turn % 2 else (ways.other, ways.one):
                speed = _send(engine, prompts, experiment.size.tokens, way, finish)
                if turn:
                    way.speeds.append(speed)
    finally:
        engine.stop()
    return ways


def _send(
    engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, way: Way, finish: Callable[[Way], None]
) -> float:
    requests = [
        Request(
            str(index),
            prompt,
            tokens,
            SamplingParams(temperature=0),
            ignore_eos=True,
            capture=way.capture,
            speculate=way.speculate,
        )
        for index, prompt in enumerate(prompts)
    ]
    begun = time.perf_counter()
    seconds_of(engine, requests)
    finish(way)
    return len(prompts) * tokens / (time.perf_counter() - begun)
