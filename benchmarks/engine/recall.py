"""``osd bench recall``: speed of recall on a stream of prompts, starting with an empty table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks import engines
from benchmarks.options import After, Parallel, Prompts, Tokens, TopP
from benchmarks.streams import TokenTimes, answers_of, decoding_rate, updates_of, wait_until_idle
from benchmarks.turns import Spread, rotated
from osd.cli.common import ConfigFile, Overrides, Temperature, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
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
"""Number of the stream's requests that are also decoded plainly, for the early speed-up of recall."""


def recall(
    stream: Prompts = "unittest",
    draft: Annotated[
        str | None, typer.Option(help="Also measure a drafter: a kind of osd bench decode.", metavar="KIND")
    ] = None,
    streams: Parallel = 1,
    after: After = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Number of following prompts to measure on.")] = 32,
    tokens: Tokens = 96,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the speed of recall from an empty table on.

    The first requests of the stream are decoded plainly too. Standard output gets a line of JSON for each wave and one
    with all figures, standard error the tables. Recall drafts as much as pays; a drafter has its default growth.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    if draft is not None:
        engines.check_draft(draft)
    engines.check_slots(settings, streams)
    if prompts < streams:
        fail(f"--prompts must be at least --streams {streams}, not {prompts}")
    with engines.loading():
        texts = load(stream)
        directory = target_directory(settings)
        drafter, name = (None, None) if draft is None else engines.find_drafter(settings, draft, directory)
        growth = settings.growth if settings.growth.kind == "best_first" else BestFirstSettings()
        engine_settings = settings.engine.model_copy(update={"prefix_cache": True})
        settings = settings.model_copy(update={"growth": growth, "verification": None, "engine": engine_settings})
        setup = RecallSetup.of(settings, directory, drafter)
    engine, longest = setup.engine, setup.engine.target.context - tokens
    token_ids = engines.encode_short(engine.tokenizer, texts, longest, stream, after + prompts)[: after + prompts]
    plan = RecallPlan(streams, after, prompts, tokens, SamplingParams(temperature=temperature, top_p=top_p))
    waves: list[RecallWave] = []
    with engines.running(engine):
        for wave in serve(setup, token_ids, plan):
            typer.echo(json.dumps(asdict(wave)))
            waves.append(wave)
    results = summarize(setup, waves)
    about = {"target": settings.target.source, "stream": stream, "draft": name, "streams": streams, "after": after}
    about |= {"prompts": prompts, "tokens": tokens, "temperature": temperature, "top_p": top_p, **results.figures()}
    typer.echo(json.dumps(about))
    figures = {**about, "waves": [asdict(wave) for wave in waves]}
    conclude(tables(results), figures, json_file, notes=notes(results), stderr=True)


@dataclass(frozen=True)
class DecodingWay:
    """Way to decode requests: plainly, or with the drafters of the domain of the same name.

    The stream is served to ways with ``learn``, whose drafters remember it. ``policy`` is None for the engine's own.
    """

    name: str
    learn: bool = False
    policy: Policy | None = None


@dataclass(frozen=True)
class RecallPlan:
    """Size of a measurement: ``after`` requests of the stream, ``streams`` at once, then ``unseen`` requests."""

    streams: int
    after: int
    unseen: int
    tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class RecallWave:
    """Requests decoded together in one way, starting with number ``first`` of the stream."""

    way: str
    phase: Literal["stream", "unseen"]
    first: int
    requests: int
    tokens_per_second: float  # tokens of all requests while every one decodes; 0 if one ended before all had started
    tokens: int  # tokens of all requests without each first token
    forwards: int  # forwards for these tokens; a forward for several requests counts for each
    busy_seconds: float  # busy time of the engine
    counts: SpeculationCounts


@dataclass(frozen=True)
class RecallSetup:
    """Engine with the drafters of all ``ways``; plain decoding is the first way."""

    engine: Engine
    ways: Sequence[DecodingWay]

    @classmethod
    def of(cls, settings: Settings, directory: Path, trained: Drafter | None) -> RecallSetup:
        """Load the target from ``directory``, with the trained drafter alone and with recall if there is one.

        Each way has its own domain. The trained drafter alone has its default growth. Prompt lookup is recall with a
        table that stays empty.
        """
        ways = [DecodingWay(PLAIN), DecodingWay(RECALL, learn=True), DecodingWay(LOOKUP)]
        drafters: list[tuple[str, Drafter]] = [(RECALL, Recall()), (LOOKUP, Recall())]
        if trained is not None:
            ways += [DecodingWay(DRAFTER, policy=Policy.of(ConfidenceSettings())), DecodingWay(MIXED, learn=True)]
            drafters = [(MIXED, Mixed(trained)), *drafters, (DRAFTER, trained)]
        return cls(engine_with_domains(settings, directory, drafters), ways)


def engine_with_domains(settings: Settings, directory: Path, drafters: Sequence[tuple[str, Drafter]]) -> Engine:
    """Return an engine, not started, with a domain for each drafter; the first one decides the captured states."""
    (domain, drafter), *rest = drafters
    engine = engines.engine_with(settings.model_copy(update={"domain": domain}), directory, drafter)
    assert engine.pool is not None  # noqa: S101  it has a drafter
    for name, drafter in rest:
        engine.pool.open(name, 1, drafter.weights(), drafter)
    return engine


def serve(setup: RecallSetup, prompts: Sequence[tuple[int, ...]], plan: RecallPlan) -> Iterator[RecallWave]:
    """Serve the stream to the ways that learn, its first requests also plainly; then measure on unseen prompts.

    The ways take turns on the same prompts. One plain wave before is the warm-up. The running engine has the prefix
    cache and a slot for each stream.
    """
    ways = setup.ways
    _wave(setup, ways[0], STREAM, 0, prompts[: plan.streams], plan)
    for first in range(0, plan.after, plan.streams):
        wave_prompts = prompts[first : min(first + plan.streams, plan.after)]
        learning = [way for way in ways if way.learn]
        present = [ways[0], *learning] if first < FIRST else learning
        say(f"request {first} of the stream's {plan.after}")
        for way in rotated(present, first // plan.streams):
            yield _wave(setup, way, STREAM, first, wave_prompts, plan)
    for turn in range(plan.unseen // plan.streams):
        first = plan.after + turn * plan.streams
        say(f"unseen prompt {first - plan.after} of {plan.unseen}")
        for way in rotated(ways, turn):
            yield _wave(setup, way, UNSEEN, first, prompts[first : first + plan.streams], plan)


def _wave(
    setup: RecallSetup, way: DecodingWay, phase: Literal["stream", "unseen"], first: int,
    prompts: Sequence[tuple[int, ...]], plan: RecallPlan,
) -> RecallWave:  # fmt: skip
    # Prompts are read first, so that all requests decode together; otherwise short answers end before the last start.
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
    before = wait_until_idle(setup.engine)
    arrivals: TokenTimes = defaultdict(list)
    counts = SpeculationCounts()
    for moment, update in updates_of(setup.engine, requests):
        arrivals[update.request_id].append((moment, len(update.token_ids)))
        counts.add(update.counts or SpeculationCounts())
    token_counts = [count for moments in arrivals.values() for _, count in moments[1:]]
    after = wait_until_idle(setup.engine)
    busy = after.busy_seconds - before.busy_seconds
    rate = decoding_rate(arrivals)
    return RecallWave(way.name, phase, first, len(prompts), rate, sum(token_counts), len(token_counts), busy, counts)


@dataclass(frozen=True)
class Gain:
    """Result of a way on a part of the stream.

    ``speedup`` is relative to the base way of ``gains`` on the same prompts. It and ``tokens_per_second`` are spreads
    over ``waves`` waves, the other figures are of all decoded tokens.
    """

    way: str
    waves: int
    tokens_per_second: Spread
    speedup: Spread
    mean_acceptance_length: float
    tokens_per_forward: float
    drafted_per_round: float
    acceptance_rate: float


def gains(waves: Sequence[RecallWave], base: str = PLAIN) -> list[Gain]:
    """Return the speed-up of every way over ``base``, from pairs of waves on the same prompts.

    A wave is too short if a request ends before all requests have started; it has no speed. A pair is ignored if one or
    both of its waves are too short.

    Args:
        waves: waves of ``base`` and of the ways to compare.
        base: name of the way that all ways are compared with.

    Returns:
        One result for each way, including ``base`` itself.

    Raises:
        BenchError: a way has no pair that counts.
    """
    by_way: dict[str, dict[int, RecallWave]] = defaultdict(dict)
    for wave in waves:
        by_way[wave.way][wave.first] = wave
    base_rates = {first: wave.tokens_per_second for first, wave in by_way[base].items()}
    results = []
    for way, way_waves in by_way.items():
        pairs = [
            (wave.tokens_per_second, base_rates[first]) for first, wave in way_waves.items() if first in base_rates
        ]
        pairs = [pair for pair in pairs if all(pair)]
        if not pairs:
            raise engines.BenchError(
                "the completions are too short: one ended before all had started in each wave; raise --tokens"
            )
        counts = SpeculationCounts.sum(wave.counts for wave in way_waves.values())
        results.append(
            Gain(
                way,
                len(pairs),
                Spread.of([rate for rate, _ in pairs]),
                Spread.of([rate / base_rate for rate, base_rate in pairs]),
                counts.mean_acceptance_length,
                tokens_per_forward(list(way_waves.values())),
                counts.drafted / counts.rounds if counts.rounds else 0.0,
                counts.acceptance_rate,
            )
        )
    return results


def tokens_per_forward(waves: Sequence[RecallWave]) -> float:
    """Return the mean number of tokens per sequence and forward, with or without a draft; 0 without forwards."""
    forwards = sum(wave.forwards for wave in waves)
    return sum(wave.tokens for wave in waves) / forwards if forwards else 0.0


@dataclass(frozen=True)
class RecallFigures:
    """Gains on the first requests of the stream and on unseen prompts, and the size of the table.

    ``used`` of the table's ``entries`` are in use. ``forwards`` are times of forwards of 2, 4, 8 and 16 rows, divided
    by the time of one row.
    """

    machine: Machine
    first: list[Gain]
    unseen: list[Gain]
    used: int
    entries: int
    forwards: dict[int, float]

    def figures(self) -> dict[str, Any]:
        """Return all fields for JSON, with the bytes of the table."""
        return {**asdict(self), "bytes_used": self.used * ENTRY_BYTES, "bytes": self.entries * ENTRY_BYTES}


def summarize(setup: RecallSetup, waves: Sequence[RecallWave]) -> RecallFigures:
    """Return the figures of both phases; the engine must have stopped.

    Raises:
        BenchError: the completions were too short.
    """
    pool, costs = setup.engine.pool, setup.engine.loop.planner.costs
    assert pool is not None  # noqa: S101  it has drafters
    memory = pool.memories(RECALL).of("")
    on_stream, on_unseen = ([wave for wave in waves if wave.phase == phase] for phase in (STREAM, UNSEEN))
    return RecallFigures(
        Machine.here(),
        gains([wave for wave in on_stream if wave.first < FIRST]),
        gains(on_unseen),
        memory.used(),
        memory.entries,
        {rows: costs.forward(rows) / costs.forward(1) for rows in (2, 4, 8, 16)},
    )


def tables(figures: RecallFigures) -> list[Table]:
    """Return a table of the first requests and a table of the unseen prompts."""
    return [_gain_table("the first requests", figures.first), _gain_table("unseen prompts", figures.unseen)]


def _gain_table(title: str, rows: Sequence[Gain]) -> Table:
    names = ("waves", "x plain", "tokens/s", "tokens/step", "tokens/forward", "drafted/step", "kept")
    table = Table(title, ("", *names), [])
    for gain in rows:
        speedup, speed = gain.speedup, gain.tokens_per_second.median
        cells = [str(gain.waves), speedup.text(), f"{speed:.1f}"]
        cells += [f"{gain.mean_acceptance_length:.2f}", f"{gain.tokens_per_forward:.2f}"]
        table.rows.append((gain.way, *cells, f"{gain.drafted_per_round:.1f}", f"{gain.acceptance_rate:.2f}"))
    return table


def notes(figures: RecallFigures) -> list[str]:
    """Return sentences about the machine, the table and the forwards."""
    used, total = (count * ENTRY_BYTES / 1e6 for count in (figures.used, figures.entries))
    forwards = ", ".join(f"{rows} rows {cost:.2f}" for rows, cost in figures.forwards.items())
    entries = f"{figures.used} of {figures.entries} entries, {used:.1f} of {total:.1f} MB"
    return [str(figures.machine), entries, f"forwards, in those of one row: {forwards}"]
