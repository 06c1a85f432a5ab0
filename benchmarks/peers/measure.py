"""Every peer beside our engine: the same prompts and lengths, greedily, in alternation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


Ours = Callable[[Sequence[Sequence[int]], bool], tuple[float, list[list[int]]]]
"""Decodes prompts on our engine, speculatively or not: seconds and tokens."""


def ours(engine: Engine, tokens: int) -> Ours:
    """Our engine as it is configured, ``tokens`` tokens each whatever they are."""

    def run(prompts: Sequence[Sequence[int]], speculate: bool) -> tuple[float, list[list[int]]]:
        requests = [
            Request(str(n), tuple(prompt), tokens, SamplingParams(temperature=0), ignore_eos=True, speculate=speculate)
            for n, prompt in enumerate(prompts)
        ]
        return decode(engine, requests)

    return run


def measure(
    chosen: Mapping[str, Entry],
    models: Models,
    home: Path,
    run: Ours,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """One row for each peer, whatever became of it.

    Args:
        chosen: the peers.
        models: what they decode with.
        home: where their environments are.
        run: our engine.
        prompts: ``models.streams`` a turn, in order and from the start again.
        tokens: of each completion.
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
                rows.append(compare(name, worker, run, prompts, models.streams, tokens, turns, report))
        except PeerError as error:
            report(f"{name}: {error}")
            rows.append(Row(name, problem=str(error)))
    return rows


def compare(
    name: str,
    worker: Worker,
    run: Ours,
    prompts: Sequence[tuple[int, ...]],
    streams: int,
    tokens: int,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> Row:
    """Let a peer and both ways of ours decode the same prompts in turn; another one begins each time."""
    speeds: dict[str, list[float]] = {"peer": [], "plain": [], "speculative": []}
    same = 0
    for turn in range(turns + 1):
        report(f"{name}: turn {turn} of {turns}")
        asked = [prompts[(turn * streams + n) % len(prompts)] for n in range(streams)]
        ways: dict[str, Callable[[], tuple[float, list[list[int]]]]] = {
            "peer": lambda asked=asked: worker.decode(asked, tokens),
            "plain": lambda asked=asked: run(asked, False),
            "speculative": lambda asked=asked: run(asked, True),
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
            same += sum(a == b for mine, other in pairs for a, b in zip(mine, other, strict=True))
    peer, plain, speculative = speeds.values()
    return Row(
        name,
        worker.version,
        Spread.of(peer),
        Spread.of(plain),
        Spread.of([mine / other for mine, other in zip(plain, peer, strict=True)]),
        Spread.of(speculative),
        Spread.of([mine / other for mine, other in zip(speculative, peer, strict=True)]),
        same / (turns * streams * tokens),
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
