"""``osd bench recall``: speed of recall on a stream of prompts, from an empty table on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.engines import (
    BenchError,
    check_draft,
    check_slots,
    engine_with,
    find_drafter,
    loading,
    running,
    short_enough,
)
from benchmarks.options import After, Parallel, Prompts, Tokens
from benchmarks.streams import Arrivals, answers_of, decoding_rate, settled, updates_of
from benchmarks.turns import Spread, rotated
from osd.cli.common import ConfigFile, Overrides, Temperature, fail, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.config import BestFirstSettings, ConfidenceSettings, Settings
from osd.drafting.base import Drafter
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.recall.backends import ENTRY_BYTES
from osd.runtime.machine import Machine
from osd.target.load import target_directory
from osd.traffic import load

PLAIN, RECALL, LOOKUP, DRAFTER, MIXED = "plain", "recall", "lookup", "drafter", "mixed"
STREAM, UNSEEN = "stream", "unseen"
FIRST = 30
"""Requests of the stream that are decoded plainly too, to see what recall earns from the first minute on."""


def recall(
    stream: Prompts = "unittest",
    draft: Annotated[
        str | None,
        typer.Option(help="Also with a drafter: one of those of osd bench decode.", metavar="KIND"),
    ] = None,
    streams: Parallel = 1,
    after: After = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Unseen prompts behind them, to measure on.")] = 32,
    tokens: Tokens = 96,
    temperature: Temperature = 0.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the speed of recall from an empty table on.

    The first requests of the stream are decoded plainly too. Writes a line of JSON for each wave and one of figures to
    standard output, and the tables to standard error. Recall drafts as much as pays, a drafter as it does by default.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    if draft is not None:
        check_draft(draft)
    check_slots(settings, streams)
    if prompts < streams:
        fail(f"--prompts must be at least --streams {streams}, not {prompts}")
    with loading():
        texts = load(stream)
        directory = target_directory(settings)
        drafter, name = (None, None) if draft is None else find_drafter(settings, draft, directory)
        growth = settings.growth if settings.growth.kind == "best_first" else BestFirstSettings()
        reused = settings.engine.model_copy(update={"prefix_cache": True})
        settings = settings.model_copy(update={"growth": growth, "verification": None, "engine": reused})
        setup = Setup.of(settings, directory, drafter)
    engine, longest = setup.engine, settings.engine.context - tokens
    asked = short_enough(engine.tokenizer, texts, longest, stream, after + prompts)[: after + prompts]
    plan = Plan(streams, after, prompts, tokens, SamplingParams(temperature=temperature))
    waves: list[Wave] = []
    with running(engine):
        for wave in serve(setup, asked, plan):
            typer.echo(json.dumps(asdict(wave)))
            waves.append(wave)
    found = concluded(setup, waves)
    about = {"target": settings.target.source, "stream": stream, "draft": name, "streams": streams, "after": after}
    about |= {"prompts": prompts, "tokens": tokens, "temperature": temperature, **found.figures()}
    typer.echo(json.dumps(about))
    figures = {**about, "waves": [asdict(wave) for wave in waves]}
    conclude(tables(found), figures, json_file, notes=notes(found), stderr=True)


@dataclass(frozen=True)
class Way:
    """How requests are decoded: plainly, or with the drafters of a domain of the same name.

    The stream is served to those that ``learn``, whose drafters remember it; ``policy`` is how it speculates, None as
    the engine does.
    """

    name: str
    learn: bool = False
    policy: Policy | None = None


@dataclass(frozen=True)
class Plan:
    """``after`` requests of the stream are served, ``streams`` at once; ``unseen`` further ones are measured on."""

    streams: int
    after: int
    unseen: int
    tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Wave:
    """Requests decoded together in one way, the first of them number ``first`` of the stream.

    ``tokens_per_second`` is of all of them while every one decodes, 0 where one ended before all had begun. They took
    ``tokens`` in so many ``forwards``, those of a prompt and the token after it left out; a forward that several share
    counts for each.

    The engine was busy with it for ``busy_seconds``.
    """

    way: str
    phase: Literal["stream", "unseen"]
    first: int
    requests: int
    tokens_per_second: float
    tokens: int
    forwards: int
    busy_seconds: float
    counts: SpeculationCounts


@dataclass(frozen=True)
class Setup:
    """An engine that has the drafters of all ``ways``, plain decoding first."""

    engine: Engine
    ways: Sequence[Way]

    @classmethod
    def of(cls, settings: Settings, directory: Path, trained: Drafter | None) -> Setup:
        """Load the target from ``directory``, with a trained drafter, alone and beside recall, where there is one.

        Each way's drafters are those of a domain. A trained drafter that is alone drafts as it does by default; prompt
        lookup is recall with a table into which nothing is written.
        """
        ways = [Way(PLAIN), Way(RECALL, learn=True), Way(LOOKUP)]
        drafters: list[tuple[str, Drafter]] = [(RECALL, Recall()), (LOOKUP, Recall())]
        if trained is not None:
            ways += [Way(DRAFTER, policy=Policy.of(ConfidenceSettings())), Way(MIXED, learn=True)]
            drafters = [(MIXED, Mixed(trained)), *drafters, (DRAFTER, trained)]
        # The target gives the states that the first of them reads.
        (own, first), *others = drafters
        engine = engine_with(settings.model_copy(update={"domain": own}), directory, first)
        assert engine.pool is not None  # noqa: S101  it has a drafter
        for name, drafter in others:
            engine.pool.open(name, 1, drafter.weights(), drafter)
        return cls(engine, ways)


def serve(setup: Setup, prompts: Sequence[tuple[int, ...]], plan: Plan) -> Iterator[Wave]:
    """Serve the stream to the ways that learn, the first of it to plain decoding too; then measure on unseen prompts.

    The ways take turns on the same prompts. One plain wave before them warms up.

    Args:
        setup: Its engine is running, with a slot for each stream and the prefix cache.
        prompts: ``plan.after`` and ``plan.unseen`` of them.
        plan: Requests that are served and measured.
    """
    ways = setup.ways
    _wave(setup, ways[0], STREAM, 0, prompts[: plan.streams], plan)
    for first in range(0, plan.after, plan.streams):
        asked = prompts[first : min(first + plan.streams, plan.after)]
        learning = [way for way in ways if way.learn]
        present = [ways[0], *learning] if first < FIRST else learning
        say(f"request {first} of the stream's {plan.after}")
        for way in rotated(present, first // plan.streams):
            yield _wave(setup, way, STREAM, first, asked, plan)
    for turn in range(plan.unseen // plan.streams):
        first = plan.after + turn * plan.streams
        say(f"unseen prompt {first - plan.after} of {plan.unseen}")
        for way in rotated(ways, turn):
            yield _wave(setup, way, UNSEEN, first, prompts[first : first + plan.streams], plan)


def _wave(
    setup: Setup, way: Way, phase: Literal["stream", "unseen"], first: int, prompts: Sequence[tuple[int, ...]],
    plan: Plan,
) -> Wave:  # fmt: skip
    # Prompts are read first, so that all of them decode from then on: short answers would end before others begin.
    read = [
        Request(f"read-{number}", prompt, 1, speculate=False, domain=way.name) for number, prompt in enumerate(prompts)
    ]
    answers_of(setup.engine, read)
    requests = [
        Request(
            f"{way.name}-{phase}-{number}", prompt, plan.tokens, replace(plan.sampling, seed=number),
            capture=phase == STREAM, speculate=way.name != PLAIN,
            domain=way.name, policy=way.policy,
        )
        for number, prompt in enumerate(prompts, first)
    ]  # fmt: skip
    before = settled(setup.engine)
    arrivals: Arrivals = defaultdict(list)
    counts = SpeculationCounts()
    for moment, update in updates_of(setup.engine, requests):
        arrivals[update.request_id].append((moment, len(update.token_ids)))
        counts.add(update.counts or SpeculationCounts())
    later = [count for moments in arrivals.values() for _, count in moments[1:]]
    after = settled(setup.engine)
    busy = after.busy_seconds - before.busy_seconds
    rate = decoding_rate(arrivals)
    return Wave(way.name, phase, first, len(prompts), rate, sum(later), len(later), busy, counts)


@dataclass(frozen=True)
class Gain:
    """What a way made of some of the stream; ``speedup`` is beside plain decoding of the same prompts.

    Speeds are those of so many ``waves``, all else of everything that was decoded.
    """

    way: str
    waves: int
    tokens_per_second: Spread
    speedup: Spread
    mean_acceptance_length: float
    tokens_per_forward: float
    drafted_per_round: float
    acceptance_rate: float


def gains(waves: Sequence[Wave], beside: str = PLAIN) -> list[Gain]:
    """Those of every way among ``waves`` over the one ``beside``; what one of them was too short for is left out.

    Plain decoding is among them.

    Raises:
        BenchError: all of them were too short.
    """
    by_way: dict[str, dict[int, Wave]] = defaultdict(dict)
    for wave in waves:
        by_way[wave.way][wave.first] = wave
    other = {first: wave.tokens_per_second for first, wave in by_way[beside].items()}
    found = []
    for way, mine in by_way.items():
        pairs = [(wave.tokens_per_second, other[first]) for first, wave in mine.items() if first in other]
        pairs = [pair for pair in pairs if all(pair)]
        if not pairs:
            raise BenchError("the completions are too short: each time one ended before all had begun; more --tokens")
        counts = SpeculationCounts.sum(wave.counts for wave in mine.values())
        found.append(
            Gain(
                way,
                len(pairs),
                Spread.of([mine for mine, _ in pairs]),
                Spread.of([mine / theirs for mine, theirs in pairs]),
                counts.mean_acceptance_length,
                tokens_per_forward(list(mine.values())),
                counts.drafted / counts.rounds if counts.rounds else 0.0,
                counts.acceptance_rate,
            )
        )
    return found


def tokens_per_forward(waves: Sequence[Wave]) -> float:
    """Tokens that a sequence took in a forward, whether it had a draft or not; 0 where there was none."""
    forwards = sum(wave.forwards for wave in waves)
    return sum(wave.tokens for wave in waves) / forwards if forwards else 0.0


@dataclass(frozen=True)
class Found:
    """Speed within the ``first`` requests of the stream and on ``unseen`` prompts, and the size of the table.

    Of the table's ``entries`` some are ``used``. ``forwards`` are of 2, 4, 8 and 16 rows, in those of one.
    """

    machine: Machine
    first: list[Gain]
    unseen: list[Gain]
    used: int
    entries: int
    forwards: dict[int, float]

    def figures(self) -> dict[str, Any]:
        """Return all of it, with the bytes of the table."""
        return {**asdict(self), "bytes_used": self.used * ENTRY_BYTES, "bytes": self.entries * ENTRY_BYTES}


def concluded(setup: Setup, waves: Sequence[Wave]) -> Found:
    """Put the figures of both phases together once the engine has stopped.

    Raises:
        BenchError: the completions were too short.
    """
    pool, costs = setup.engine.pool, setup.engine.loop.planner.costs
    assert pool is not None  # noqa: S101  it has drafters
    memory = pool.memories(RECALL).of("")
    on_stream, on_unseen = ([wave for wave in waves if wave.phase == phase] for phase in (STREAM, UNSEEN))
    return Found(
        Machine.here(),
        gains([wave for wave in on_stream if wave.first < FIRST]),
        gains(on_unseen),
        memory.used(),
        memory.entries,
        {rows: costs.forward(rows) / costs.forward(1) for rows in (2, 4, 8, 16)},
    )


def tables(found: Found) -> list[Table]:
    """Make the tables of both phases."""
    return [_gains("the first requests", found.first), _gains("unseen prompts", found.unseen)]


def _gains(title: str, found: Sequence[Gain]) -> Table:
    names = ("waves", "x plain", "tokens/s", "tokens/step", "tokens/forward", "drafted/step", "kept")
    table = Table(title, ("", *names), [])
    for gain in found:
        up, speed = gain.speedup, gain.tokens_per_second.median
        cells = [str(gain.waves), up.text(), f"{speed:.1f}"]
        cells += [f"{gain.mean_acceptance_length:.2f}", f"{gain.tokens_per_forward:.2f}"]
        table.rows.append((gain.way, *cells, f"{gain.drafted_per_round:.1f}", f"{gain.acceptance_rate:.2f}"))
    return table


def notes(found: Found) -> list[str]:
    """Return sentences on the machine, the table and the forwards."""
    used, room = (count * ENTRY_BYTES / 1e6 for count in (found.used, found.entries))
    forwards = ", ".join(f"{rows} rows {cost:.2f}" for rows, cost in found.forwards.items())
    entries = f"{found.used} of {found.entries} entries, {used:.1f} of {room:.1f} MB"
    return [str(found.machine), entries, f"forwards, in those of one row: {forwards}"]
