"""``osd bench economy``: speed-up measured by an engine, compared with passes of the same prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks import engines
from benchmarks.options import Parallel, Prompts, Tokens
from benchmarks.streams import decode, updates_of, wait_until_idle
from benchmarks.turns import by_way, in_turns
from osd.cli.common import ConfigFile, Overrides, Temperature, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.drafting import initial, served
from osd.economy.effect import jackknife, without_each
from osd.economy.switchback import Switchback
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import target_directory
from osd.traffic import load

PLAIN, DRAFTED, MEASURED = "plain", "drafted", "measured"

_SIGMAS = 1.96

_AGREES = {True: "yes", False: "no", None: "no interval"}


def economy(
    prompts: Prompts = "unittest",
    streams: Parallel = 1,
    sessions: Annotated[int, typer.Option(min=1, help="Number of engines, measured one after another.")] = 3,
    turns: Annotated[int, typer.Option(min=2, help="Passes of each way in a session.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts of each stream in a pass.")] = 2,
    tokens: Tokens = 96,
    temperature: Temperature = 0.0,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare the speed-up that an engine measures with passes of the same prompts.

    A session runs the same prompts plainly, with drafts, and with drafts and trials, in turns; its drafter is new and
    has the configured settings. Each of --streams users waits for an answer before the next request. The price of
    trials is the additional time of the passes with trials, which is largest in the first minutes of an engine.
    """
    settings = engines.without_prefix_cache(settings_of(config, overrides))
    check_files(json_file)
    engines.check_slots(settings, streams)
    with engines.loading():
        texts = load(prompts)
        directory = target_directory(settings)
    results: list[EconomySession] = []
    for number in range(sessions):
        with engines.loading():
            drafter = served(initial(settings.drafter, directory, settings.cache_dir), settings)
            engine = engines.engine_with(settings, directory, drafter)
        token_ids = engines.encode_short(engine.tokenizer, texts, engine.target.context - tokens, prompts)
        switchback = Switchback(settings.economy.measure, settings.economy.max_loss, seed=number)
        with engines.running(engine):
            passes = Passes(
                engine, token_ids, streams, rounds, tokens, SamplingParams(temperature=temperature), switchback
            )
            passes.warm_up(settings.engine.slots)
            results.append(passes.session(turns, number * turns))
        typer.echo(json.dumps(asdict(results[-1])))
    about = {
        "target": settings.target.source,
        "drafter": settings.drafter.kind,
        "prompts": prompts,
        "streams": streams,
        "tokens": tokens,
    }
    agree = sum(result.agrees is True for result in results)
    about |= {"temperature": temperature, "agree": agree, "sessions": sessions}
    conclude([table(results)], {**about, "found": [asdict(result) for result in results]}, json_file, stderr=True)


@dataclass(frozen=True)
class EconomySession:
    """Logarithms of the speed-ups from passes and from trials with their errors, and the price of trials."""

    offline: float
    offline_error: float
    measured: float
    width: float
    trials: int
    price: float
    price_error: float
    seconds: float

    @property
    def difference(self) -> float:
        """Difference of the two logarithms."""
        return self.measured - self.offline

    @property
    def agrees(self) -> bool | None:
        """Whether the interval of the difference contains zero; None without an interval."""
        if math.isinf(self.width):
            return None
        return abs(self.difference) <= math.hypot(self.width, _SIGMAS * self.offline_error)


@dataclass(frozen=True)
class Passes:
    """Passes of one engine over the same prompts in three ways."""

    engine: Engine
    prompts: Sequence[tuple[int, ...]]
    streams: int
    rounds: int
    tokens: int
    sampling: SamplingParams
    switchback: Switchback

    def warm_up(self, slots: int) -> None:
        """Decode in each of the engine's slots: the first use of their memory is slow, in whichever way it happens."""
        decode(self.engine, self._requests("warm-up", range(slots), speculate=False))

    def session(self, turns: int, first: int) -> EconomySession:
        """Run each way once per turn, starting at prompt ``first``."""
        ways = {way: partial(self._run, way, first) for way in (PLAIN, DRAFTED, MEASURED)}
        seconds = {way: np.array(values) for way, values in by_way(in_turns(ways, turns, say)).items()}
        plain, drafted, measured = (seconds[way] for way in (PLAIN, DRAFTED, MEASURED))
        effect = self.switchback.measured.effect
        return EconomySession(
            *_log_ratio(plain, drafted), effect.log if effect else math.nan, effect.width if effect else math.inf,
            effect.trials if effect else 0, *_log_ratio(measured, drafted), float(sum(map(np.sum, seconds.values()))),
        )  # fmt: skip

    def _run(self, way: str, first: int, turn: int) -> float:
        """Return the busy seconds of a pass."""
        count = self.streams * self.rounds
        begin = (first + turn) * count
        requests = self._requests(f"{way}-{turn}", range(begin, begin + count), way != PLAIN)
        self.engine.set_speculation(way != PLAIN)
        self.engine.loop.planner.switchback = self.switchback if way == MEASURED else None
        before = wait_until_idle(self.engine).busy_seconds
        for _ in updates_of(self.engine, requests, users=self.streams):
            pass
        return wait_until_idle(self.engine).busy_seconds - before

    def _requests(self, name: str, numbers: range, speculate: bool) -> list[Request]:
        """Return a request for each of the ``numbers`` of prompts."""
        return [
            Request(
                f"{name}-{seed}", self.prompts[number % len(self.prompts)], self.tokens,
                SamplingParams(temperature=self.sampling.temperature, seed=seed), ignore_eos=True, speculate=speculate,
            )
            for seed, number in enumerate(numbers)
        ]  # fmt: skip


def _log_ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """Return the logarithm of the ratio of the sums, and its standard error over the turns."""
    return jackknife(np.log(without_each(numerators) / without_each(denominators)))


def table(results: Sequence[EconomySession]) -> Table:
    """Return a table with both speed-ups of each session, their intervals and the price of trials."""
    rows = [
        (
            str(number), f"{math.exp(result.offline):.3f} ±{_SIGMAS * result.offline_error:.3f}",
            f"{math.exp(result.measured):.3f} ±{result.width:.3f}", str(result.trials), f"{result.difference:+.3f}",
            _AGREES[result.agrees], f"{result.price:+.2%} ±{_SIGMAS * result.price_error:.2%}",
            f"{result.seconds:.0f}",
        )
        for number, result in enumerate(results, 1)
    ]  # fmt: skip
    heads = ("session", "passes", "measured", "trials", "difference", "agree", "price of trials", "seconds")
    return Table("Speed-up over plain decoding, with 95 % intervals", heads, rows)
