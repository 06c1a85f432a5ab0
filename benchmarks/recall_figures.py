"""What recall earned on a stream of prompts: figures of the waves in which it was served."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.figures import Mean, Quartiles
from benchmarks.nodes import Calibration, Tally, tallies
from benchmarks.pair import BenchError
from benchmarks.recall import FIRST, MIXED, PLAIN, RECALL, STREAM, UNSEEN, Setup, Wave
from osd.metrics import SpeculationCounts
from osd.recall.backends import ENTRY_BYTES
from osd.recall.memory import KEPT, Backend, Heard, Memory, Sought, mark_of
from osd.runtime.machine import Machine

_BLOCKS = 8  # of the curve
_DEEP = 8  # tokens of a path; nodes further down are counted together
_NODES, _ROWS = 64, 16  # of a timed draft, and of a timed update


@dataclass(frozen=True)
class Gain:
    """What a way made of some of the stream; ``speedup`` is beside plain decoding of the same prompts.

    Speeds are those of so many ``waves``, all else of everything that was decoded. The ``ledger_error`` is by how much
    the engine's busy time with what its ledger says was saved differs from that of plain decoding, in shares of that;
    None where several decode at once: they end one after another, which the ledger takes for fewer clients.
    """

    way: str
    waves: int
    tokens_per_second: Quartiles
    speedup: Quartiles
    mean_acceptance_length: float
    tokens_per_forward: float
    drafted_per_round: float
    acceptance_rate: float
    ledger_error: float | None


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
                Quartiles.of([mine for mine, _ in pairs]),
                Quartiles.of([mine / theirs for mine, theirs in pairs]),
                counts.mean_acceptance_length,
                tokens_per_forward(list(mine.values())),
                counts.drafted / counts.rounds if counts.rounds else 0.0,
                counts.acceptance_rate,
                _ledger_error(mine, by_way[PLAIN]),
            )
        )
    return found


def _ledger_error(mine: dict[int, Wave], plain: dict[int, Wave]) -> float | None:
    pairs = [(wave, plain[first]) for first, wave in mine.items() if first in plain]
    if any(wave.requests > 1 for wave, _ in pairs):
        return None
    said = sum(wave.busy_seconds + wave.saved_seconds for wave, _ in pairs)
    took = sum(other.busy_seconds for _, other in pairs)
    return said / took - 1


@dataclass(frozen=True)
class Added:
    """What a trained drafter adds to recall: the time of the same prompts with both, in that with recall alone.

    ``geometric_mean`` and ``median`` are of the ratios of busy seconds a token, of so many ``waves``. ``error`` is the
    standard error of the former's logarithm.
    """

    waves: int
    geometric_mean: float
    error: float
    median: float


def added(waves: Sequence[Wave]) -> Added | None:
    """Of all waves that were answered in both ways, None where there are fewer than two."""
    took: dict[str, dict[int, float]] = defaultdict(dict)
    for wave in waves:
        if wave.tokens:
            took[wave.way][wave.first] = wave.busy_seconds / wave.tokens
    ratios = [both / took[RECALL][first] for first, both in took[MIXED].items() if first in took[RECALL]]
    if len(ratios) < 2:
        return None
    log = Mean.of(torch.tensor(ratios).log())
    return Added(len(ratios), math.exp(log.value), log.error, statistics.median(ratios))


def tokens_per_forward(waves: Sequence[Wave]) -> float:
    """Tokens that a sequence took in a forward, whether it had a draft or not; 0 where there was none."""
    forwards = sum(wave.forwards for wave in waves)
    return sum(wave.tokens for wave in waves) / forwards if forwards else 0.0


@dataclass(frozen=True)
class Block:
    """Requests of the stream that follow each other, up to number ``until``."""

    until: int
    mean_acceptance_length: float
    tokens_per_forward: float


def curve(waves: Sequence[Wave]) -> list[Block]:
    """Of one way along the stream, in about ``_BLOCKS`` equal parts."""
    each = max(1, math.ceil(len(waves) / _BLOCKS))
    blocks = []
    for place in range(0, len(waves), each):
        mine = waves[place : place + each]
        length = SpeculationCounts.sum(wave.counts for wave in mine).mean_acceptance_length
        blocks.append(Block(mine[-1].first + mine[-1].requests, length, tokens_per_forward(mine)))
    return blocks


@dataclass(frozen=True)
class Timed:
    """Microseconds of a memory: of what it says after one context, and of learning one verified row."""

    query: Quartiles
    update: Quartiles


def timed(memory: Memory, backend: Backend, texts: Sequence[tuple[int, ...]]) -> Timed | None:
    """Time queries and updates behind each of ``texts``, on a copy of ``memory``; None where none is long enough.

    A query is a context of a draft of ``_NODES`` nodes: what is known there, mixed, sorted and judged. An update is a
    row of a round that kept ``_ROWS`` tokens: what the target said is compared with what was known, and learnt. Nothing
    else may use the machine meanwhile.
    """
    copy, drafting = backend.memory(memory.entries), backend.drafting()
    copy.load(memory.contents())
    generator = torch.Generator().manual_seed(0)
    logp = torch.tensor([[0.5] + [0.5 / KEPT] * (KEPT - 1)] * (1 + _ROWS)).log()
    query, update = [], []
    for tokens in texts:
        read, drawn = tokens[: -_ROWS - 1], tokens[-_ROWS - 1 :]
        if not read:
            continue
        text = backend.text(len(tokens))
        text.append(read, certain=True)
        begun = time.perf_counter()
        found = drafting.draft([Sought(copy, text, _NODES, 0.0)], _NODES, 0.0, chains=False)
        seconds = time.perf_counter() - begun
        if found.tokens:
            query.append(seconds / len(found.tokens) * 1e6)
        ids = torch.randint(max(tokens) + 1, (1 + _ROWS, KEPT), generator=generator)
        ids[:, 0] = torch.tensor(drawn)
        heard = Heard(drawn[:-1], range(-1, _ROWS - 1), ids, logp, drawn)
        begun = time.perf_counter()
        copy.learn(text, heard, 0.0, reader=mark_of(str(len(update))), now=1)
        update.append((time.perf_counter() - begun) / len(drawn) * 1e6)
    return Timed(Quartiles.of(query), Quartiles.of(update)) if query else None


@dataclass(frozen=True)
class Drafts:
    """Nodes by the longest context that knew them, by depth and by source, and how right their chances were.

    ``asked`` is the share of the drafts for which the trained drafter was asked.
    """

    contexts: dict[str, Tally]
    depths: dict[str, Tally]
    sources: dict[str, Tally]
    calibration: Calibration
    asked: float

    @classmethod
    def of(cls, waves: Sequence[Wave]) -> Drafts:
        """Of those of ``waves``."""
        drafts = [draft for wave in waves for draft in wave.drafts]
        nodes = [node for draft in drafts for node in draft.nodes()]
        return cls(
            tallies(nodes, lambda node: node.context),
            tallies(nodes, lambda node: str(node.depth) if node.depth < _DEEP else f"{_DEEP} and more"),
            tallies(nodes, lambda node: node.source),
            Calibration.of(nodes),
            sum(draft.asked for draft in drafts) / max(len(drafts), 1),
        )


@dataclass(frozen=True)
class Learner:
    """A way that remembers: how it came along the stream, and its drafts there and on unseen prompts."""

    curve: list[Block]
    stream: Drafts
    unseen: Drafts

    @classmethod
    def of(cls, waves: Sequence[Wave]) -> Learner:
        """Of all its waves."""
        stream, unseen = ([wave for wave in waves if wave.phase == phase] for phase in (STREAM, UNSEEN))
        return cls(curve(stream), Drafts.of(stream), Drafts.of(unseen))


@dataclass(frozen=True)
class Found:
    """What recall earned, within the ``first`` requests of the stream and on ``unseen`` prompts, and what it costs.

    ``added`` is what a trained drafter adds on these, None where there is none. ``learners`` are the ways that
    remember. Of the table's ``entries`` some are ``used``. ``forwards`` are of 2, 4, 8 and 16 rows, in those of one.
    """

    machine: Machine
    first: list[Gain]
    unseen: list[Gain]
    added: Added | None
    learners: dict[str, Learner]
    used: int
    entries: int
    microseconds: Timed | None
    forwards: dict[int, float]

    def figures(self) -> dict[str, Any]:
        """All of it, with the bytes of the table."""
        return {**asdict(self), "bytes_used": self.used * ENTRY_BYTES, "bytes": self.entries * ENTRY_BYTES}


def conclude(setup: Setup, waves: Sequence[Wave], unseen: Sequence[tuple[int, ...]]) -> Found:
    """Put the figures of both phases together, the second on ``unseen`` prompts, once the engine has stopped.

    Raises:
        BenchError: the completions were too short.
    """
    pool, costs = setup.engine.pool, setup.engine.loop.planner.costs
    assert pool is not None  # noqa: S101  it has drafters
    memories = pool.memories(RECALL)
    memory = memories.of("")
    on_unseen = [wave for wave in waves if wave.phase == UNSEEN]
    return Found(
        Machine.here(),
        gains([wave for wave in waves if wave.phase == STREAM and wave.first < FIRST]),
        gains(on_unseen),
        added(on_unseen),
        {way.name: Learner.of([wave for wave in waves if wave.way == way.name]) for way in setup.ways if way.learn},
        memory.used(),
        memory.entries,
        timed(memory, memories.backend, unseen),
        {rows: costs.forward(rows) / costs.forward(1) for rows in (2, 4, 8, 16)},
    )
