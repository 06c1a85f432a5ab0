"""Every peer beside our engine: the same prompts and lengths, greedily, in alternation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.peers.conversation import Worker, command
from benchmarks.peers.environments import PeerError
from benchmarks.peers.roster import Entry, Models
from benchmarks.report import columns
from benchmarks.streams import decode
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams

_SHORTEST = 8  # tokens of an answer that is timed


@dataclass(frozen=True)
class Row:
    """A peer's tokens a second, prefill included, and ours within the same turn, each divided by it.

    ``same`` is the share of its tokens that are ours at the same place. ``problem`` says why there are no figures.
    """

    peer: str
    version: str = ""
    tokens_per_second: Spread | None = None
    plain: Spread | None = None
    plain_ratio: Spread | None = None
    speculative: Spread | None = None
    speculative_ratio: Spread | None = None
    same: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt, and how many tokens the target answers with before it ends, as far as that was looked at."""

    prompt: tuple[int, ...]
    answer: int


Ours = Callable[[Sequence[Sequence[int]], int, bool], tuple[float, list[list[int]]]]
"""Decodes prompts on our engine, so many tokens each, speculatively or not: seconds and tokens."""


def ours(engine: Engine) -> Ours:
    """Our engine as it is configured; nothing of what it decodes is remembered."""

    def run(prompts: Sequence[Sequence[int]], tokens: int, speculate: bool) -> tuple[float, list[list[int]]]:
        greedy = SamplingParams(temperature=0)
        requests = [
            Request(str(n), tuple(prompt), tokens, greedy, ignore_eos=True, speculate=speculate, capture=False)
            for n, prompt in enumerate(prompts)
        ]
        return decode(engine, requests)

    return run


def serve(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
    """Answer prompts of the stream one after the other, up to ``tokens`` each; drafters that remember do."""
    for number, prompt in enumerate(prompts):
        decode(engine, [Request(f"served-{number}", prompt, tokens, SamplingParams(temperature=0))])


def answered(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Asked]:
    """Prompts with the lengths of our plain greedy answers: up to ``tokens``, and what is shorter than 8 left out.

    What a model goes on to write behind the end of its answer repeats itself, and would flatter whoever copies.
    """
    greedy = SamplingParams(temperature=0)
    found = []
    for number, prompt in enumerate(prompts):
        _, (answer,) = decode(engine, [Request(str(number), prompt, tokens, greedy, speculate=False, capture=False)])
        found.append(Asked(prompt, len(answer)))
    return [one for one in found if one.answer >= _SHORTEST]


def measure(
    chosen: Mapping[str, Entry],
    models: Models,
    home: Path,
    run: Ours,
    asked: Sequence[Asked],
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """One row for each peer, whatever became of it.

    Args:
        chosen: the peers.
        models: what they decode with.
        home: where their environments are.
        run: our engine.
        asked: ``models.streams`` a turn, in order and from the start again; all of a turn get as many tokens as the
            shortest answer of theirs.
        turns: to take medians of, after one to warm up.
        report: told what is being done.
    """
    rows = []
    for name, entry in chosen.items():
        report(f"{name}: starting")
        try:
            load = entry.load(models)  # what has nothing to decode with needs no environment
            python = Path(sys.executable) if entry.environment is None else entry.environment.python(home, report)
            shared = {"OMP_NUM_THREADS": str(models.threads), "HF_HUB_OFFLINE": "1"}
            environment = shared | entry.variables(models, python.parent.parent)
            with Worker(command(python, entry.script), load, environment) as worker:
                rows.append(compare(name, worker, run, asked, models.streams, turns, report))
        except PeerError as error:
            report(f"{name}: {error}")
            rows.append(Row(name, problem=str(error)))
    return rows


def compare(
    name: str,
    worker: Worker,
    run: Ours,
    asked: Sequence[Asked],
    streams: int,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> Row:
    """Let a peer and both ways of ours decode the same prompts in turn; another one begins each time."""
    speeds: dict[str, list[float]] = {"peer": [], "plain": [], "speculative": []}
    same = decoded = 0
    for turn in range(turns + 1):
        report(f"{name}: turn {turn} of {turns}")
        mine = [asked[(turn * streams + n) % len(asked)] for n in range(streams)]
        prompts, tokens = [one.prompt for one in mine], min(one.answer for one in mine)
        ways: dict[str, Callable[[], tuple[float, list[list[int]]]]] = {
            "peer": partial(worker.decode, prompts, tokens),
            "plain": partial(run, prompts, tokens, False),
            "speculative": partial(run, prompts, tokens, True),
        }
        names = list(ways)
        found = {way: ways[way]() for way in names[turn % 3 :] + names[: turn % 3]}
        for way, (_, ids) in found.items():
            if [len(row) for row in ids] != [tokens] * streams:
                raise PeerError(f"{way} decoded {[len(row) for row in ids]} tokens, not {tokens} of each prompt")
        if turn:
            for way, (seconds, _) in found.items():
                speeds[way].append(streams * tokens / seconds)
            pairs = zip(found["peer"][1], found["plain"][1], strict=True)
            same += sum(a == b for theirs, other in pairs for a, b in zip(theirs, other, strict=True))
            decoded += streams * tokens
    peer, plain, speculative = speeds.values()
    return Row(
        name,
        worker.version,
        Spread.of(peer),
        Spread.of(plain),
        Spread.of([mine / other for mine, other in zip(plain, peer, strict=True)]),
        Spread.of(speculative),
        Spread.of([mine / other for mine, other in zip(speculative, peer, strict=True)]),
        same / decoded,
    )


def table(rows: Sequence[Row]) -> Grid:
    """Medians with their spread, and what kept a peer from being measured."""
    grid = columns("peer", "tokens/s", "ours plain", "is times it", "ours speculative", "is times it", "same", "")
    grid.columns[-1].justify, grid.columns[-1].no_wrap = "left", False
    for row in rows:
        spreads = (row.tokens_per_second, row.plain, row.plain_ratio, row.speculative, row.speculative_ratio)
        digits = (1, 1, 2, 1, 2)
        cells = ["" if spread is None else spread.text(digits=d) for spread, d in zip(spreads, digits, strict=True)]
        same = "" if row.same is None else f"{row.same:.2f}"
        grid.add_row(row.peer, *cells, same, row.problem or row.version)
    return grid
