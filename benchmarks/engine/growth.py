"""Accepted tokens per step of each growth policy, with drafts of one size at the same positions of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.engine.live import LiveBatch, LiveDraft, positions
from benchmarks.engines import ModelPair
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
"""Rules to measure with each growth policy."""

_GUESS = (0.5, 0.2, 0.1, 0.05, 0.03, 0.02)  # prior acceptance by child rank, which counts soon outweigh
_DIFFERENCES = (("dynamic_tree", "static_tree"), ("dynamic_tree", "chain"))


@dataclass(frozen=True)
class GrowthSize:
    """Size of a measurement: drafts of ``budget`` tokens with paths of at most ``depth``, at ``contexts`` positions.

    ``batch`` sequences decode at a time, for ``steps`` decoding steps each; every draft is verified ``repeats`` times.
    The acceptance that shapes the static trees is counted before, at ``contexts`` positions of other prompts.
    """

    budget: int = 8
    depth: int = 8
    contexts: int = 192
    batch: int = 8
    steps: int = 24
    repeats: int = 4


@dataclass(frozen=True)
class GrowthResult:
    """Accepted tokens per step, draft tokens and drafter forwards of one growth policy with one rule."""

    growth: str
    rule: str
    accepted: Mean
    drafted: float
    calls: float


@dataclass(frozen=True)
class GrowthComparison:
    """Results of one sampling setting.

    ``differences`` are differences of accepted tokens between two policies at the same positions; ``static_tree`` is
    the best tree, as paths of child ranks.
    """

    temperature: float
    top_p: float
    contexts: int
    rows: list[GrowthResult]
    differences: dict[str, Mean]
    static_tree: list[tuple[int, ...]]


@dataclass
class _GrowthRecord:
    """Figures of one growth policy, with one tensor [B] per step: accepted tokens by rule, and drafted tokens."""

    accepted: dict[str, list[Tensor]]
    drafted: list[Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def measure(
    pair: ModelPair, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, plan: GrowthSize
) -> GrowthComparison:
    """Decode ``prompts``; at each position draft with every policy and verify with its rules.

    The pair has a slot per sequence of the batch, and scratch for the budget. The first prompts are used to count
    acceptance, the next ones to measure.
    """
    static = StaticTree(acceptance=_GUESS, budget=plan.budget, depth=plan.depth)
    sparse = SparseTree([_GUESS] * plan.depth, budget=plan.budget)
    dynamic = DynamicTree(plan.budget)
    size = plan.contexts, plan.batch, plan.steps
    for live, done in positions(pair, prompts, sampling, 0, size):
        say(f"counting acceptance: {done} of {plan.contexts} contexts")
        _count_acceptance(live, (dynamic, sparse, static), sampling.temperature > 0)
    policies: dict[str, Growth] = {
        "chain": Chain(plan.budget),
        "static_tree": static,
        "dynamic_tree": dynamic,
        "sparse_tree": sparse,
        "top_k_tree": TopKTree(plan.budget, depth=plan.depth),
    }
    records = {name: _GrowthRecord({rule: [] for rule in RULES[name]}) for name in policies}
    for live, done in positions(pair, prompts, sampling, -(-plan.contexts // (plan.batch * plan.steps)), size):
        say(f"temperature {sampling.temperature:g}: {done} of {plan.contexts} contexts")
        _compare(live, policies, records, plan.repeats)
    rows = [
        GrowthResult(
            name, rule, Mean.of(torch.cat(accepted)), float(torch.cat(record.drafted).double().mean()),
            sum(record.calls) / len(record.calls),
        )
        for name, record in records.items()
        for rule, accepted in record.accepted.items()
    ]  # fmt: skip
    differences = {}
    for first, second in _DIFFERENCES:
        for rule, second_rule in zip(RULES[first], RULES[second], strict=True):
            difference = torch.cat(records[first].accepted[rule]) - torch.cat(records[second].accepted[second_rule])
            differences[f"{first}, {rule} - {second}, {second_rule}"] = Mean.of(difference)
    contexts = len(torch.cat(records["chain"].drafted))
    return GrowthComparison(sampling.temperature, sampling.top_p, contexts, rows, differences, static.paths)


def _count_acceptance(live: LiveBatch, growths: Sequence[StaticTree | DynamicTree], is_sampled: bool) -> None:
    """Draft with each policy, let it learn the target's acceptance, and advance."""
    verified: list[tuple[LiveDraft, Verdict]] = []
    for index, growth in enumerate(growths):
        drafted = live.draft(growth, index)
        verdict = _verify(drafted, RULES[growth.name][0], live, index + len(growths))
        draft, outcomes = drafted.draft, list[DraftOutcome]()
        for b, size in enumerate(draft.sizes.tolist()):
            path = verdict.path[b][: int(verdict.accepted[b])].tolist()
            estimates = () if draft.estimates is None else draft.estimates[b, :size].tolist()
            outcomes.append(DraftOutcome(draft.parents[b, :size].tolist(), path, estimates, is_sampled))
        if isinstance(growth, StaticTree) and growth.table is not None:
            for outcome in outcomes:
                growth.table.observe(outcome.parents, outcome.path)
            if growth.table.due():
                growth.reshape(None)  # by acceptance only, because all policies have the same size
        else:
            growth.observe(outcomes, lambda together: {})
        verified.append((drafted, verdict))
    live.advance(*verified[-1])


def _compare(live: LiveBatch, policies: dict[str, Growth], records: dict[str, _GrowthRecord], repeats: int) -> None:
    last: list[tuple[LiveDraft, Verdict]] = []
    for index, (name, growth) in enumerate(policies.items()):
        before = live.calls
        drafted = live.draft(growth, index)
        record = records[name]
        record.calls.append(live.calls - before)
        record.drafted.append(drafted.draft.sizes)
        for rule, accepted in record.accepted.items():
            kept = torch.zeros(len(drafted.draft.sizes), dtype=torch.float64)
            for repeat in range(repeats):
                verdict = _verify(drafted, rule, live, len(policies) * (1 + repeat) + index)
                kept += verdict.accepted / repeats
                last = [(drafted, verdict)]
            accepted.append(kept)
    live.advance(*last[0])


def _verify(drafted: LiveDraft, rule: str, live: LiveBatch, purpose: int) -> Verdict:
    return VERIFICATIONS[rule].verify(drafted.draft, drafted.p, live.noise(purpose))


def table(comparison: GrowthComparison) -> Table:
    """Return a table of accepted tokens by growth policy and rule, and of the differences between policies."""
    limit = f", top-p {comparison.top_p:g}" if comparison.top_p < 1 else ""
    title = f"growth at temperature {comparison.temperature:g}{limit}, {comparison.contexts} contexts"
    table = Table(title, ("growth, rule", "accepted/step", "drafted", "drafter calls"), [])
    for row in comparison.rows:
        cells = (row.accepted.text(), f"{row.drafted:.1f}", f"{row.calls:.1f}")
        table.rows.append((f"{row.growth}, {row.rule}", *cells))
    table.rows.extend((name, f"{mean.value:+.3f} ±{mean.error:.2f}") for name, mean in comparison.differences.items())
    return table
