"""Every verification rule on the same drafts of a real pair of models, next to what no rule can surpass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import closed_forms
from benchmarks.figures import Mean, Row, Table, difference
from benchmarks.live import Drafted, Live
from benchmarks.pair import Pair
from osd.engine.request import SamplingParams
from osd.speculation.compatibility import IncompatibleError, compatible
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.tree import Draw
from osd.speculation.verification import VERIFICATIONS, Rule, Verdict

_ON_CHAINS = ("chain", "block", "naive")  # siblings, k_seq and greedy_multidraft are chain there, and traversal block
_NEVER_LESS = (
    ("chain", "block", "chain"),
    ("iid", "traversal", "siblings"),
    ("without_replacement", "traversal", "siblings"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured: trees whose root has ``drafts`` children and whose paths have ``depth`` tokens.

    ``contexts`` places of the text are drafted at, ``batch`` sequences at a time, ``rounds`` places of each;
    each draft is verified ``repeats`` times by each rule.
    """

    drafts: int = 3
    depth: int = 3
    contexts: int = 32
    batch: int = 8
    rounds: int = 4
    repeats: int = 8

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The tree: nodes have a child fewer on each level, and one at least."""
        level: list[tuple[int, ...]] = [()]
        paths = []
        for depth in range(self.depth):
            level = [(*path, rank) for path in level for rank in range(max(1, self.drafts - depth))]
            paths += level
        return paths


@dataclass(frozen=True)
class Kind:
    """A way to draw, and the rules that are lossless for it."""

    name: str
    growth: Growth
    drafts: int
    rules: tuple[Rule, ...]

    @property
    def draw(self) -> Draw:
        """How siblings are drawn."""
        return next(iter(self.growth.draws))


def kinds(plan: Plan) -> list[Kind]:
    """Every way to draw a tree, and the chain last."""
    found = []
    for draw in Draw:
        growth = GROWTHS["static_tree"](paths=plan.paths, draw=draw)
        found.append(Kind(draw.value, growth, plan.drafts, tuple(_fitting(growth))))
    chain = GROWTHS["chain"](plan.depth)
    return [*found, Kind("chain", chain, 1, tuple(VERIFICATIONS[name] for name in _ON_CHAINS))]


def _fitting(growth: Growth) -> Iterator[Rule]:
    for rule in VERIFICATIONS.values():
        try:
            compatible(growth, rule)
        except IncompatibleError:
            continue
        if not rule.chains_only:
            yield rule


def measure(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    plan: Plan,
    report: Callable[[int], None] = lambda contexts: None,
) -> Table:
    """Decode ``prompts`` by the chain rule, and at each place draft in every way and verify by every rule.

    Args:
        pair: with as many slots as the plan's batch.
        prompts: taken in order, and from the start again.
        sampling: of all sequences; a temperature above 0.
        plan: how much.
        report: told how many contexts are done.
    """
    ways = kinds(plan)
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    done = number = 0
    while done < plan.contexts:
        count = min(plan.batch, plan.contexts - done)
        chosen = [prompts[(number * plan.batch + i) % len(prompts)] for i in range(count)]
        live = Live(pair, chosen, sampling, number)
        for _ in range(min(plan.rounds, -(-(plan.contexts - done) // count))):
            _round(live, ways, plan.repeats, samples)
            done += count
            report(done)
        live.close()
        number += 1
    return _table(ways, samples, sampling)


@dataclass(frozen=True)
class Sample:
    """What one rule did at the contexts of one round, [B] float64 each; ``exact`` where a formula is known."""

    kept: Tensor
    first: Tensor
    exact: Tensor | None
    bound: Tensor


def _round(live: Live, ways: list[Kind], repeats: int, samples: dict[tuple[str, str], list[Sample]]) -> None:
    kept_on: list[tuple[Drafted, Verdict]] = []
    for index, way in enumerate(ways):
        drafted = live.draft(way.growth, index)
        draft, p = drafted.draft, drafted.p
        every, first = torch.arange(len(p)), torch.zeros(len(p), dtype=torch.int64)
        root = draft.spread(draft.q_at(every, first), every, first, p.shape[-1])
        # Rounding must not decide what is above what.
        root, after = (values.double() / values.double().sum(-1, keepdim=True) for values in (root, p[:, 0]))
        bound = closed_forms.bound(after, root, way.drafts, way.draw)
        for rule in way.rules:
            kept, first = torch.zeros_like(bound), torch.zeros_like(bound)
            for repeat in range(repeats):
                # Rules share their numbers, which leaves less to chance in what one keeps more than the other.
                verdict = rule.verify(draft, p, live.noise(len(ways) * (1 + repeat) + index))
                kept += verdict.accepted / repeats
                first += (verdict.accepted > 0) / repeats
                if way is ways[-1] and rule is way.rules[0] and repeat == 0:
                    kept_on.append((drafted, verdict))
            exact = closed_forms.acceptance(rule.name, after, root, way.drafts, way.draw)
            if rule.name == "block" and way.growth.max_nodes > 1:
                exact = None  # it weighs the tokens after the first too
            samples[way.name, rule.name].append(Sample(kept, first, exact, bound))
    live.advance(*kept_on[0])


def _table(ways: list[Kind], samples: dict[tuple[str, str], list[Sample]], sampling: SamplingParams) -> Table:
    rows, broken = [], []
    kept: dict[tuple[str, str], Tensor] = {}
    for way in ways:
        for rule in way.rules:
            mine = samples[way.name, rule.name]
            kept[way.name, rule.name] = torch.cat([sample.kept for sample in mine])
            first, bound = (torch.cat([getattr(sample, name) for sample in mine]) for name in ("first", "bound"))
            exact = [sample.exact for sample in mine if sample.exact is not None]
            tree_wise = rule.name == "traversal" and way.growth.max_nodes > way.drafts
            formula = torch.cat(exact) if len(exact) == len(mine) and not tree_wise else None
            row = Row(
                draw=way.name,
                drafts=way.drafts,
                rule=rule.name,
                length=Mean.of(1 + kept[way.name, rule.name]),
                first=Mean.of(first),
                exact=None if formula is None else float(formula.mean()),
                bound=float(bound.mean()),
            )
            rows.append(row)
            if difference(bound, first).below_zero or (formula is not None and bool((formula > bound + 1e-6).any())):
                broken.append(row.above)
    for draw, more, less in _NEVER_LESS:
        gain = difference(kept[draw, more], kept[draw, less])
        if gain.below_zero:
            broken.append(f"{more} on {draw} keeps {-gain.value:.4f} tokens a round less than {less}")
    return Table(sampling.temperature, sampling.top_p, len(next(iter(kept.values()))), rows, broken)
