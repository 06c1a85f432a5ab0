"""What a long prompt does to requests that decode beside it, and what the second turn of a long chat has to read."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.pair import BenchError
from benchmarks.report import columns
from benchmarks.streams import settled
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update

_BEFORE = 10  # rounds of every stream before the prompt comes
_PERCENTILE = 99


@dataclass(frozen=True)
class Plan:
    """``streams`` decode beside a prompt of ``prompt`` tokens; a chat's second turn adds ``turn`` to such a prompt."""

    streams: int
    prompt: int
    turn: int
    turns: int


@dataclass(frozen=True)
class Turn:
    """Seconds between the rounds that gave a stream tokens, without a prompt ``beside`` and with one.

    The prompt then had its first token after ``read`` seconds. A chat had the first token of its first turn after
    ``first`` seconds and that of its ``second`` after so many.
    """

    alone: float
    beside: float
    read: float
    first: float
    second: float


class _Watched:
    """Requests of an engine, with the moments at which each got tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._updates: queue.Queue[tuple[float, Update]] = queue.Queue()
        self.moments: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}

    def ask(self, name: str, prompt: Sequence[int], tokens: int, temperature: float = 0.0) -> float:
        """Send a request; returns when."""
        self.moments[name], self.tokens[name] = [], []
        sampling = SamplingParams(temperature=temperature, seed=len(self.moments))
        request = Request(name, tuple(prompt), tokens, sampling, ignore_eos=True)
        now = time.perf_counter()
        self._engine.submit(request, lambda update: self._updates.put((time.perf_counter(), update)))
        return now

    def until(self, done: Callable[[], bool]) -> None:
        """Take updates until something holds.

        Raises:
            BenchError: a request ended too soon or failed.
        """
        while not done():
            moment, update = self._updates.get(timeout=600)
            if update.finish_reason not in (None, "length"):
                raise BenchError(f"a request ended with {update.finish_reason}: {update.error}")
            if update.token_ids:
                self.moments[update.request_id].append(moment)
                self.tokens[update.request_id] += update.token_ids
            if update.finish_reason and not done():
                raise BenchError("a stream ended while it was measured: a longer engine.context")

    def stop(self) -> None:
        """Cancel what runs."""
        for name in self.moments:
            self._engine.cancel(name)
        settled(self._engine)


def measure(
    engine: Engine, texts: Sequence[tuple[int, ...]], plan: Plan, report: Callable[[str], None] = lambda step: None
) -> Iterator[Turn]:
    """Take each turn with prompts of its own, the first of them to warm up.

    Args:
        engine: running, with a slot for every stream and one more, and the prefix cache.
        texts: prompts of the streams; longer ones are made of several.
        plan: how much.
        report: told which turn begins.

    Raises:
        BenchError: the texts or the context are too short.
    """
    ids = [token for text in texts for token in text]
    needed = (plan.turns + 1) * (2 * plan.prompt + plan.turn)
    if len(ids) < needed:
        raise BenchError(f"the prompts have {len(ids)} tokens together and {needed} are needed")
    place = 0

    def next_ids(count: int) -> list[int]:
        nonlocal place
        place += count
        return ids[place - count : place]

    for turn in range(plan.turns + 1):
        report(f"turn {turn} of {plan.turns}")
        streams = [texts[(turn * plan.streams + n) % len(texts)] for n in range(plan.streams)]
        if turn % 2:
            alone, (beside, read) = _gap(engine, streams, None)[0], _gap(engine, streams, next_ids(plan.prompt))
        else:
            (beside, read), alone = _gap(engine, streams, next_ids(plan.prompt)), _gap(engine, streams, None)[0]
        first, second = _chat(engine, next_ids(plan.prompt), next_ids(plan.turn))
        if turn:
            yield Turn(alone, beside, read, first, second)


def _gap(engine: Engine, streams: Sequence[tuple[int, ...]], prompt: Sequence[int] | None) -> tuple[float, float]:
    """The 99th percentile of the seconds between two rounds of a stream, and until the prompt's first token."""
    watched, context = _Watched(engine), engine.settings.engine.context
    names = [str(number) for number in range(len(streams))]
    for name, text in zip(names, streams, strict=True):
        # At temperature 0 what goes on behind an answer's end repeats itself, and is drafted by the dozen.
        watched.ask(name, text, context - len(text), temperature=1.0)
    watched.until(lambda: all(len(watched.moments[name]) > _BEFORE for name in names))
    begun, read = time.perf_counter(), 0.0
    if prompt is None:
        watched.until(lambda: all(len(watched.moments[name]) > 12 * _BEFORE for name in names))
    else:
        begun = watched.ask("long", prompt, 1)
        watched.until(lambda: bool(watched.moments["long"]))
        read = watched.moments["long"][0] - begun
    gaps = []
    for name in names:
        mine = [moment for moment in watched.moments[name] if moment >= begun]
        gaps += [after - before for before, after in pairwise(mine)]
    watched.stop()
    if len(gaps) < 2:
        raise BenchError("the prompt was read before the streams went on: a longer one")
    return statistics.quantiles(gaps, n=100, method="inclusive")[_PERCENTILE - 1], read


def _chat(engine: Engine, opening: Sequence[int], further: Sequence[int]) -> tuple[float, float]:
    """Seconds to the first token of two turns, the second of which begins with all of the first."""
    watched, answered = _Watched(engine), 16
    begun = watched.ask("first", opening, answered)
    watched.until(lambda: len(watched.tokens["first"]) == answered)
    first = watched.moments["first"][0] - begun
    settled(engine)
    begun = watched.ask("second", [*opening, *watched.tokens["first"], *further], 1)
    watched.until(lambda: bool(watched.moments["second"]))
    settled(engine)
    return first, watched.moments["second"][0] - begun


def table(turns: Sequence[Turn]) -> Grid:
    """Medians with the least and the most; ratios are taken within a turn."""
    grid = columns("", "median (least to most)")
    for name, values, scale in (
        ("99th percentile between tokens alone, ms", [turn.alone for turn in turns], 1e3),
        ("beside a long prompt, ms", [turn.beside for turn in turns], 1e3),
        ("times alone", [turn.beside / turn.alone for turn in turns], 1.0),
        ("first token of that prompt, s", [turn.read for turn in turns], 1.0),
        ("first token of a chat's first turn, s", [turn.first for turn in turns], 1.0),
        ("second turn, s", [turn.second for turn in turns], 1.0),
        ("of the first", [turn.second / turn.first for turn in turns], 1.0),
    ):
        grid.add_row(name, Spread.of(values).text(scale, 1 if scale > 1 else 2))
    return grid
