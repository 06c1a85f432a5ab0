"""``osd bench economy``: measured speed-up of an engine, compared with passes of the same prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer

from benchmarks.engines import (
    check_slots,
    engine_with,
    loading,
    reading_anew,
    running,
    short_enough,
)
from benchmarks.options import Parallel, Prompts, Tokens
from benchmarks.streams import settled, updates_of
from benchmarks.turns import by_way, in_turns
from osd.cli.common import ConfigFile, Overrides, Temperature, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.drafting import initial, served
from osd.economy.effect import jackknife
from osd.economy.switchback import Switchback
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import target_directory
from osd.traffic import load

PLAIN, DRAFTED, MEASURED = "plain", "drafted", "measured"

_SIGMAS = 1.96


def economy(
    prompts: Prompts = "unittest",
    streams: Parallel = 1,
    sessions: Annotated[int, typer.Option(min=1, help="Engines that are measured one after the other.")] = 3,
    turns: Annotated[int, typer.Option(min=2, help="Passes in each way, of a session.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts of each stream in a pass.")] = 2,
    tokens: Tokens = 96,
    temperature: Temperature = 0.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare the speed-up that an engine measures with passes of the same prompts.

    A session runs the same prompts plainly, with drafts, and with drafts and trials, in turns; its drafter begins as
    the settings say. As many users as there are streams each wait for an answer before they ask again. The price of
    trials is the additional time of the passes with trials.
    """
    settings = reading_anew(settings_of(config, overrides))
    check_files(json_file)
    check_slots(settings, streams)
    with loading():
        texts = load(prompts)
        directory = target_directory(settings)
    found: list[Session] = []
    for number in range(sessions):
        with loading():
            first = served(initial(settings.drafter, directory, settings.home_dir), settings)
            engine = engine_with(settings, directory, first)
        asked = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, prompts)
        switchback = Switchback(settings.economy.measure, settings.economy.max_loss, seed=number)
        with running(engine):
            passes = Passes(engine, asked, streams, rounds, tokens, SamplingParams(temperature=temperature), switchback)
            found.append(passes.session(turns, number * turns))
        typer.echo(json.dumps(asdict(found[-1])))
    about = {
        "target": settings.target.source,
        "drafter": settings.drafter.kind,
        "prompts": prompts,
        "streams": streams,
        "tokens": tokens,
    }
    about |= {"temperature": temperature, "agree": sum(one.agrees for one in found), "sessions": sessions}
    conclude([table(found)], {**about, "found": [asdict(one) for one in found]}, json_file, stderr=True)


@dataclass(frozen=True)
class Session:
    """Logarithms of the offline and of the measured speed-up with their errors, and the price of trials."""

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
        """Of the two logarithms."""
        return self.measured - self.offline

    @property
    def agrees(self) -> bool:
        """Whether the interval of the difference covers zero."""
        return abs(self.difference) <= math.hypot(self.width, _SIGMAS * self.offline_error)


@dataclass(frozen=True)
class Passes:
    """The ways that one engine decodes the same prompts."""

    engine: Engine
    prompts: Sequence[tuple[int, ...]]
    streams: int
    rounds: int
    tokens: int
    sampling: SamplingParams
    switchback: Switchback

    def session(self, turns: int, first: int) -> Session:
        """Run each way once a turn, from prompt ``first`` on."""
        ways = {way: partial(self._run, way, first) for way in (PLAIN, DRAFTED, MEASURED)}
        took = {way: np.array(seconds) for way, seconds in by_way(in_turns(ways, turns, say)).items()}
        plain, drafted, measured = (took[way] for way in (PLAIN, DRAFTED, MEASURED))
        effect = self.switchback.measured.effect
        return Session(
            *_log_ratio(plain, drafted), effect.log if effect else math.nan, effect.width if effect else math.inf,
            effect.trials if effect else 0, *_log_ratio(measured, drafted), float(sum(map(np.sum, took.values()))),
        )  # fmt: skip

    def _run(self, way: str, first: int, turn: int) -> float:
        """Busy seconds of a pass."""
        count = self.streams * self.rounds
        requests = [
            Request(
                f"{way}-{turn}-{n}", self.prompts[((first + turn) * count + n) % len(self.prompts)], self.tokens,
                SamplingParams(temperature=self.sampling.temperature, seed=n), ignore_eos=True, speculate=way != PLAIN,
            )
            for n in range(count)
        ]  # fmt: skip
        self.engine.set_speculation(way != PLAIN)
        self.engine.loop.planner.switchback = self.switchback if way == MEASURED else None
        before = settled(self.engine).busy_seconds
        for _ in updates_of(self.engine, requests, users=self.streams):
            pass
        return settled(self.engine).busy_seconds - before


def _log_ratio(these: np.ndarray, those: np.ndarray) -> tuple[float, float]:
    """Logarithm of the ratio of both sums, and its standard error over turns."""
    without = np.log((these.sum() - these) / (those.sum() - those))
    return float(np.log(these.sum() / those.sum())), jackknife(without)


def table(found: Sequence[Session]) -> Table:
    """Make a table of all sessions."""
    rows = [
        (
            str(number), f"{math.exp(one.offline):.3f} ±{_SIGMAS * one.offline_error:.3f}",
            f"{math.exp(one.measured):.3f} ±{one.width:.3f}", str(one.trials), f"{one.difference:+.3f}",
            "yes" if one.agrees else "no", f"{one.price:+.2%} ±{_SIGMAS * one.price_error:.2%}", f"{one.seconds:.0f}",
        )
        for number, one in enumerate(found, 1)
    ]  # fmt: skip
    heads = ("session", "passes", "measured", "trials", "difference", "agree", "price of trials", "seconds")
    return Table("Speed-up over plain decoding, with 95 % intervals", heads, rows)
