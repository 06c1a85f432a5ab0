"""What versions of a drafter save: the same requests with each of them in turns, beside what was expected of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table as Grid

from benchmarks import ledger
from benchmarks.figures import Mean
from benchmarks.ledger import Block, Plan, Way
from benchmarks.pair import BenchError
from benchmarks.report import columns
from osd.drafters.base import DrafterError
from osd.engine.engine import Engine
from osd.learning.evaluation import length_of
from osd.learning.value import SECOND, Traffic
from osd.registry.versions import Version
from osd.runtime.device import cores
from osd.speculation.growth import make_growth

_LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class Gain:
    """What a version saves against the one ``before``, in seconds of a core in each second, and what was expected.

    Attributes:
        number: of the version.
        before: of the one that its gate compared it with.
        published: expected when it was published, of the traffic at that time; None where nothing was said.
        expected: the same reckoning, from the same gate, of the traffic that is measured; None without a gate.
        clock: by the busy seconds that each of both took for a token, over the blocks.
        ledger: by what the ledger says that each of both saved against plain decoding.
    """

    number: int
    before: int
    published: float | None
    expected: float | None
    clock: Mean
    ledger: Mean


def measure(
    engine: Engine,
    versions: Sequence[Version],
    prompts: Sequence[tuple[int, ...]],
    rate: float,
    plan: Plan,
    report: Callable[[str], None] = lambda step: None,
    answered: Callable[[Block], None] = lambda block: None,
) -> list[Gain]:
    """Answer each block of prompts with each version, which take turns, as does which begins; greedily.

    Args:
        engine: running, without the prefix cache and without recall, with a drafter of the versions' configuration.
        versions: of a registry, in order.
        prompts: ``plan.prompts`` of them, none of which comes in two blocks.
        rate: of requests a second, from independent users.
        plan: how many.
        report: told which block begins.
        answered: told of each block.

    Raises:
        BenchError: the weights of a version do not fit.
        RuntimeError: a request failed.
    """
    pairs = descent(versions)
    blocks: list[Block] = []
    expected: dict[int, list[float]] = {}
    ways = [Way(str(one.number), True, lambda one=one: _swap(engine, one)) for one in versions]
    for block in ledger.measure(engine, prompts, ledger.Traffic(0, rate), plan, report, ways):
        answered(block)
        blocks.append(block)
        for one, other in pairs:
            if block.way == str(one.number) and (saving := _expected(engine, other)) is not None:
                expected.setdefault(other.number, []).append(saving)
    threads = cores(engine.settings.engine.threads)
    return [_gain(one, other, blocks, expected.get(other.number), threads) for one, other in pairs]


def descent(versions: Sequence[Version]) -> list[tuple[Version, Version]]:
    """Each version behind the one that its gate compared it with, where that is among them."""
    numbered = {one.number: one for one in versions}
    parents = ((numbered.get(one.manifest.get("parent") or 0), one) for one in versions)
    return [(parent, one) for parent, one in parents if parent is not None]


def _swap(engine: Engine, version: Version) -> None:
    """Have ``version`` draft from now on."""
    number, domain = version.number, engine.settings.domain
    try:
        engine.stage(number, version.weights)
    except DrafterError as error:
        raise BenchError(f"version {number} of {domain} cannot draft: {error}") from None
    while engine.drafter_version != number:
        if (why := engine.drafters(domain).swap_failure(number)) is not None:
            raise BenchError(f"version {number} of {domain} cannot be swapped in: {why}")
        time.sleep(_LOOK_SECONDS)


def _expected(engine: Engine, version: Version) -> float | None:
    """What ``version`` is to save of what is asked of ``engine``, which has the one before; None without its gate."""
    gate = version.manifest.get("gate", {})
    kept, kept_before = gate.get("kept_per_depth"), gate.get("baseline_kept_per_depth")
    workload = engine.workloads().get(engine.settings.domain)
    # Beside recall a gate looks only at what that leaves open.
    if not kept or not kept_before or workload is None or gate["weight"] < 1:
        return None
    before, after = length_of(kept_before), length_of(kept)
    second = SECOND if make_growth(engine.settings.growth).by_worth else 0.0
    traffic = Traffic([workload], len(kept), before, second)
    return traffic.saving_rate(before, after) * cores(engine.settings.engine.threads)


def _gain(one: Version, other: Version, blocks: Sequence[Block], expected: list[float] | None, threads: int) -> Gain:
    mine, theirs = ([block for block in blocks if block.way == str(each.number)] for each in (other, one))
    took, saved = [], []
    for now, before in zip(mine, theirs, strict=True):
        per_second = threads * now.tokens / now.seconds
        took.append(per_second * (before.took - now.took))
        saved.append(per_second * (now.saved_seconds / now.tokens - before.saved_seconds / before.tokens))
    return Gain(
        other.number,
        one.number,
        (other.manifest.get("worth") or {}).get("saving_rate"),
        sum(expected) / len(expected) if expected else None,
        Mean.of(torch.tensor(took)),
        Mean.of(torch.tensor(saved)),
    )


def table(gains: Sequence[Gain]) -> Grid:
    """The figures as a table."""
    grid = columns("version", "against", "expected when published", "expected here", "by the clock", "by the ledger")
    for one in gains:
        said = ("-" if value is None else f"{value:.4f}" for value in (one.published, one.expected))
        measured = (f"{mean.value:.4f} +- {mean.error:.4f}" for mean in (one.clock, one.ledger))
        grid.add_row(str(one.number), str(one.before), *said, *measured)
    return grid
