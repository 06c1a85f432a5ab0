"""Tokens accepted in a step by growth policy: drafts of one size, at the same places of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.engine.live import Drafted, Live
from benchmarks.engines import Pair
from benchmarks.turns import Mean
from osd.cli.report import Table, say
from osd.drafting.growth import DraftOutcome, Growth
from osd.drafting.growth.chain import Chain
from osd.drafting.growth.dynamic_tree import DynamicTree
from osd.drafting.growth.sparse_tree import SparseTree
from osd.drafting.growth.static_tree import StaticTree
from osd.drafting.growth.top_k_tree import TopKTree
from osd.engine.request import SamplingParams
from osd.verification import VERIFICATIONS, Verdict

RULES = {
    "chain": ("chain", "block"),
    "static_tree": ("siblings", "traversal"),
    "dynamic_tree": ("siblings", "traversal"),
    "sparse_tree": ("naive",),
    "top_k_tree": ("naive",),
}
"""What is measured: growth policies, and rules that verify their drafts."""

_GUESS = (0.5, 0.2, 0.1, 0.05, 0.03, 0.02)  # of acceptance by child rank; what is counted soon outweighs it
_PROMISED = (("dynamic_tree", "static_tree"), ("dynamic_tree", "chain"))


@dataclass(frozen=True)
class Plan:
    """Drafts of ``budget`` tokens, in paths of at most ``depth``, at ``contexts`` places of the text.

    ``batch`` sequences decode at a time, ``rounds`` rounds each; every draft is verified ``repeats`` times. As many
    places of other prompts come before, where the acceptance that static trees are the best for is counted.
    """

    budget: int = 8
    depth: int = 8
    contexts: int = 192
    batch: int = 8
    rounds: int = 24
    repeats: int = 4


@dataclass(frozen=True)
class Row:
    """One growth policy under one rule: tokens accepted a round, draft tokens, and forwards of the drafter."""

    growth: str
    rule: str
    accepted: Mean
    drafted: float
    calls: float


@dataclass(frozen=True)
class Comparison:
    """The rows of one sampling setting.

    ``differences`` say how much more one policy accepts than another at the same places; ``static_tree`` are the paths
    of child ranks of the tree that was the best.
    """

    temperature: float
    top_p: float
    contexts: int
    rows: list[Row]
    differences: dict[str, Mean]
    static_tree: list[tuple[int, ...]]


@dataclass
class _Seen:
    """What was seen of one growth policy, a tensor [B] a round: by rule what was accepted, and what was drafted."""

    accepted: dict[str, list[Tensor]]
    drafted: list[Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def measure(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    plan: Plan,
) -> Comparison:
    """Decode ``prompts``; at each place draft in every way and verify by the rules that fit.

    Args:
        pair: with as many slots as the plan's batch, and scratch for the budget.
        prompts: the first ones for counting acceptance, the following ones for measuring, and from the start again.
        sampling: of all sequences.
        plan: how much.
    """
    static = StaticTree(acceptance=_GUESS, budget=plan.budget, depth=plan.depth)
    sparse = SparseTree([_GUESS] * plan.depth, budget=plan.budget)
    dynamic = DynamicTree(plan.budget)
    for live, done in _places(pair, prompts, sampling, plan, 0):
        say(f"counting acceptance: {done} of {plan.contexts} contexts")
        _count(live, (dynamic, sparse, static), sampling.temperature > 0)
    ways: dict[str, Growth] = {
        "chain": Chain(plan.budget),
        "static_tree": static,
        "dynamic_tree": dynamic,
        "sparse_tree": sparse,
        "top_k_tree": TopKTree(plan.budget, depth=plan.depth),
    }
    seen = {name: _Seen({rule: [] for rule in RULES[name]}) for name in ways}
    for live, done in _places(pair, prompts, sampling, plan, -(-plan.contexts // (plan.batch * plan.rounds))):
        say(f"temperature {sampling.temperature:g}: {done} of {plan.contexts} contexts")
        _compare(live, ways, seen, plan.repeats)
    rows = [
        Row(
            name,
            rule,
            Mean.of(torch.cat(accepted)),
            float(torch.cat(one.drafted).double().mean()),
            sum(one.calls) / len(one.calls),
        )
        for name, one in seen.items()
        for rule, accepted in one.accepted.items()
    ]
    differences = {}
    for more, less in _PROMISED:
        for mine, theirs in zip(RULES[more], RULES[less], strict=True):
            a, b = (torch.cat(seen[name].accepted[rule]) for name, rule in ((more, mine), (less, theirs)))
            differences[f"{more}, {mine} - {less}, {theirs}"] = Mean.of(a - b)
    contexts = len(torch.cat(seen["chain"].drafted))
    return Comparison(sampling.temperature, sampling.top_p, contexts, rows, differences, static.paths)


def _places(
    pair: Pair, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, plan: Plan, number: int
) -> Iterator[tuple[Live, int]]:
    """Running sequences, once for each round that is wanted of them; batch ``number`` is the first."""
    done = 0
    while done < plan.contexts:
        count = min(plan.batch, plan.contexts - done)
        live = Live(pair, [prompts[(number * plan.batch + i) % len(prompts)] for i in range(count)], sampling, number)
        for _ in range(min(plan.rounds, -(-(plan.contexts - done) // count))):
            yield live, done
            done += count
        live.close()
        number += 1


def _count(live: Live, growths: Sequence[StaticTree | DynamicTree], drawn: bool) -> None:
    """Let each of ``growths`` see what the target accepts of its drafts here, and take its best shape; go on."""
    done: list[tuple[Drafted, Verdict]] = []
    for index, growth in enumerate(growths):
        drafted = live.draft(growth, index)
        verdict = _verify(drafted, RULES[growth.name][0], live, index + len(growths))
        draft, outcomes = drafted.draft, list[DraftOutcome]()
        for b, size in enumerate(draft.sizes.tolist()):
            path = verdict.path[b][: int(verdict.accepted[b])].tolist()
            estimates = () if draft.estimates is None else draft.estimates[b, :size].tolist()
            outcomes.append(DraftOutcome(draft.parents[b, :size].tolist(), path, estimates, drawn))
        if isinstance(growth, StaticTree) and growth.table is not None:
            for outcome in outcomes:
                growth.table.observe(outcome.parents, outcome.path)
            if growth.table.due():
                growth.reshape(None)  # by acceptance alone: all are compared at one size
        else:
            growth.observe(outcomes, lambda together: {})
        done.append((drafted, verdict))
    live.advance(*done[-1])


def _compare(live: Live, ways: dict[str, Growth], seen: dict[str, _Seen], repeats: int) -> None:
    last: list[tuple[Drafted, Verdict]] = []
    for index, (name, growth) in enumerate(ways.items()):
        before = live.calls
        drafted = live.draft(growth, index)
        one = seen[name]
        one.calls.append(live.calls - before)
        one.drafted.append(drafted.draft.sizes)
        for rule, accepted in one.accepted.items():
            kept = torch.zeros(len(drafted.draft.sizes), dtype=torch.float64)
            for repeat in range(repeats):
                verdict = _verify(drafted, rule, live, len(ways) * (1 + repeat) + index)
                kept += verdict.accepted / repeats
                last = [(drafted, verdict)]
            accepted.append(kept)
    live.advance(*last[0])


def _verify(drafted: Drafted, rule: str, live: Live, purpose: int) -> Verdict:
    return VERIFICATIONS[rule].verify(drafted.draft, drafted.p, live.noise(purpose))


def table(found: Comparison) -> Table:
    """Make a table of accepted tokens by growth policy and rule, and of how much more one accepts than another."""
    limit = f", top-p {found.top_p:g}" if found.top_p < 1 else ""
    title = f"growth at temperature {found.temperature:g}{limit}, {found.contexts} contexts"
    table = Table(title, ("growth, rule", "accepted/step", "drafted", "drafter calls"), [])
    for row in found.rows:
        cells = (row.accepted.text(), f"{row.drafted:.1f}", f"{row.calls:.1f}")
        table.rows.append((f"{row.growth}, {row.rule}", *cells))
    table.rows.extend((name, f"{mean.value:+.3f} ±{mean.error:.2f}") for name, mean in found.differences.items())
    return table
