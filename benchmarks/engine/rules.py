"""``osd bench rules``: draft tokens kept by each verification rule and by each growth policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.engine import closed_forms, growth
from benchmarks.engine.live import LiveBatch, LiveDraft, positions
from benchmarks.engines import CONTEXT, ModelPair, check_draft, encode_short, load_pair, loading
from benchmarks.options import Contexts, Depth, Draft, Drafts, Prompts, TopP
from benchmarks.turns import Mean
from osd.cli.common import AsJson, ConfigFile, Overrides, fail, settings_of
from osd.cli.exit_codes import FAILURE
from osd.cli.report import Bars, ReportFile, Svg, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.drafting.compatibility import IncompatibleError, check_compatible
from osd.drafting.growth import GROWTHS, Growth
from osd.engine.request import SamplingParams
from osd.runtime.device import several_cores
from osd.traffic import load
from osd.verification import VERIFICATIONS, Rule, Verdict
from osd.verification.tree import Draw

_PARTS = ("rules", "growth")
_LONGEST_PROMPT = 192  # tokens
# On chains siblings, k_seq and greedy_multidraft equal chain, and traversal equals block.
_ON_CHAINS = ("chain", "block", "naive")
_NEVER_LESS = (
    ("chain", "block", "chain"),
    ("iid", "traversal", "siblings"),
    ("without_replacement", "traversal", "siblings"),
)


def rules(
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="rules: every verification rule on the same drafts; growth: trees and chains of one size at the same "
            "positions. Default: both.",
            metavar="PART",
        ),
    ] = None,
    temperature: Annotated[
        list[float],
        typer.Option("--temperature", min=0, max=2, help="Repeat the option for several; rules need a value above 0."),
    ] = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    drafts: Drafts = 3,
    depth: Depth = 3,
    budget: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each draft in the comparison of growth.")] = 8,
    contexts: Contexts = 32,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    plot: Svg = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare verification rules and growth policies on one text.

    The exit code is 1 if block keeps fewer tokens than chain, traversal fewer than siblings, or a rule more than the
    bound.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot)
    check_draft(draft)
    chosen = parts or list(_PARTS)
    for part in chosen:
        if part not in _PARTS:
            fail(f"--part must be one of {', '.join(_PARTS)}, not {part}")
    plan, growth_plan = RulePlan(drafts, depth, contexts), growth.GrowthSize(budget, budget, contexts)
    with stop_signals():
        with loading():
            texts = load(prompts)[: 4 * contexts]
            nodes = max(len(plan.paths), depth, budget)
            pair = load_pair(settings, draft, slots=plan.batch, context=CONTEXT, nodes=nodes)
        several_cores(settings.engine.threads)
        token_ids = encode_short(pair.tokenizer, texts, _LONGEST_PROMPT, prompts)
        sampling = [SamplingParams(temperature=value, top_p=top_p) for value in temperature]
        comparisons = [
            measure(pair, token_ids, params, plan)
            for params in sampling
            if "rules" in chosen and params.temperature > 0
        ]
        trees = [growth.measure(pair, token_ids, params, growth_plan) for params in sampling if "growth" in chosen]
    about: dict[str, Any] = {"target": settings.target.source, "draft": pair.draft, "prompts": prompts, "depth": depth}
    about["growth"] = [asdict(comparison) for comparison in trees]
    report(comparisons, about, json_file, plot, map(growth.table, trees), as_json)


@dataclass(frozen=True)
class RuleResult:
    """Result of one rule on the drafts of one draw."""

    draw: str
    drafts: int
    rule: str
    length: Mean | None  # tokens per step with the bonus token
    first: Mean  # measured share of steps that keep one of the first tokens
    exact: float | None  # the same by formula, None without a formula
    bound: float  # highest share of any rule

    @property
    def acceptance(self) -> float:
        """Acceptance of the first token by formula, or measured if there is no formula."""
        return self.first.value if self.exact is None else self.exact

    @property
    def gap(self) -> float:
        """Difference between the bound and the acceptance."""
        return self.bound - self.acceptance

    @property
    def above(self) -> str:
        """Message for an acceptance above the bound."""
        return f"{self.rule} on {self.draw} accepts {self.acceptance:.4f}, above the bound {self.bound:.4f}"


@dataclass(frozen=True)
class RuleComparison:
    """Results of one sampling setting over ``contexts`` positions, and messages about violated expectations."""

    temperature: float
    top_p: float
    contexts: int
    rows: list[RuleResult]
    broken: list[str]

    @property
    def title(self) -> str:
        """Sampling setting as text."""
        limit = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{limit}, {self.contexts} contexts"

    def table(self) -> Table:
        """Return a table with a row for each rule, grouped by the way to draw and the number of drafts."""
        lengths = any(row.length is not None for row in self.rows)
        names = (*(["tokens/step"] if lengths else []), "first token", "formula", "bound", "gap")
        table, before = Table(self.title, ("draw, drafts, rule", *names), []), ""
        for row in self.rows:
            if row.draw != before:
                table.rows.append((f"{row.draw}, {row.drafts}",))
            cells = [row.length.text()] if row.length is not None else []
            cells += [row.first.text(), "" if row.exact is None else f"{row.exact:.3f}"]
            table.rows.append((f"  {row.rule}", *cells, f"{row.bound:.3f}", f"{row.gap:.3f}"))
            before = row.draw
        return table

    def figures(self) -> dict[str, object]:
        """Return all fields for JSON."""
        return {**asdict(self), "rows": [{**asdict(row), "gap": row.gap} for row in self.rows]}


def report(
    comparisons: Sequence[RuleComparison],
    about: Mapping[str, object],
    json_file: Path | None,
    plot: Path | None,
    more_tables: Iterable[Table] = (),
    as_json: bool = False,
) -> None:
    """Print the tables, write the files, and exit with 1 if an expectation is violated."""
    tables = [*(comparison.table() for comparison in comparisons), *more_tables]
    bars = [
        Bars(
            f"{comparison.title}: accepted first tokens; the line is the bound of all rules",
            [(f"{row.draw}, {row.drafts}: {row.rule}", row.acceptance, row.bound) for row in comparison.rows],
        )
        for comparison in comparisons
    ]
    conclude(
        tables,
        {**about, "tables": [comparison.figures() for comparison in comparisons]},
        json_file,
        plots=bars,
        plot=plot,
        as_json=as_json,
    )
    broken = [f"{comparison.title}: {message}" for comparison in comparisons for message in comparison.broken]
    for message in broken:
        say(f"osd: {message}")
    if broken:
        raise typer.Exit(FAILURE)


@dataclass(frozen=True)
class RulePlan:
    """Size of a measurement: trees whose root has ``drafts`` children and whose paths have ``depth`` tokens.

    The trees are drafted at ``contexts`` positions of the text: ``batch`` sequences at a time, ``steps`` positions
    each. Each draft is verified ``repeats`` times by each rule.
    """

    drafts: int = 3
    depth: int = 3
    contexts: int = 32
    batch: int = 8
    steps: int = 4
    repeats: int = 8

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Paths of the tree; each level has one child less per node, at least one."""
        level: list[tuple[int, ...]] = [()]
        paths = []
        for depth in range(self.depth):
            level = [(*path, rank) for path in level for rank in range(max(1, self.drafts - depth))]
            paths += level
        return paths


@dataclass(frozen=True)
class DrawKind:
    """Way to draw siblings, with a growth policy and the rules that are lossless for it."""

    name: str
    growth: Growth
    drafts: int
    rules: tuple[Rule, ...]

    @property
    def draw(self) -> Draw:
        """Method of drawing siblings."""
        return next(iter(self.growth.draws))

    def result(
        self, rule: Rule, length: Mean | None, first: Tensor, formula: Tensor | None, bound: Tensor
    ) -> RuleResult:
        """Return the result of one rule from figures per context."""
        exact = None if formula is None else float(formula.mean())
        return RuleResult(self.name, self.drafts, rule.name, length, Mean.of(first), exact, float(bound.mean()))


def draw_kinds(plan: RulePlan) -> list[DrawKind]:
    """Return a tree for every way to draw, and the chain last."""
    trees = []
    for draw in Draw:
        growth = GROWTHS["static_tree"](paths=plan.paths, draw=draw)
        trees.append(DrawKind(draw.value, growth, plan.drafts, tuple(_lossless_rules(growth))))
    chain = GROWTHS["chain"](plan.depth)
    return [*trees, DrawKind("chain", chain, 1, tuple(VERIFICATIONS[name] for name in _ON_CHAINS))]


def _lossless_rules(growth: Growth) -> Iterator[Rule]:
    for rule in VERIFICATIONS.values():
        try:
            check_compatible(growth, rule)
        except IncompatibleError:
            continue
        if not rule.chains_only:
            yield rule


def measure(
    pair: ModelPair, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, plan: RulePlan
) -> RuleComparison:
    """Decode ``prompts`` with the chain rule; at each position draft with every draw and verify with every rule.

    The pair has a slot per sequence of the batch. The temperature is above 0.
    """
    kinds = draw_kinds(plan)
    samples: dict[tuple[str, str], list[RuleSample]] = defaultdict(list)
    for live, done in positions(pair, prompts, sampling, 0, (plan.contexts, plan.batch, plan.steps)):
        say(f"temperature {sampling.temperature:g}: {done} of {plan.contexts} contexts")
        _measure_step(live, kinds, plan.repeats, samples)
    return _compare(kinds, samples, sampling)


@dataclass(frozen=True)
class RuleSample:
    """Figures of one rule at the positions of one step, [B] float64 each; ``exact`` is None without a formula."""

    kept: Tensor
    first: Tensor
    exact: Tensor | None
    bound: Tensor


def _measure_step(
    live: LiveBatch, kinds: list[DrawKind], repeats: int, samples: dict[tuple[str, str], list[RuleSample]]
) -> None:
    chain_verdicts: list[tuple[LiveDraft, Verdict]] = []
    for index, kind in enumerate(kinds):
        drafted = live.draft(kind.growth, index)
        draft, p = drafted.draft, drafted.p
        rows, first = torch.arange(len(p)), torch.zeros(len(p), dtype=torch.int64)
        root = draft.spread(draft.q_at(rows, first), rows, first, p.shape[-1])
        # Double precision, so that rounding does not decide comparisons.
        root, after = (values.double() / values.double().sum(-1, keepdim=True) for values in (root, p[:, 0]))
        bound = closed_forms.bound(after, root, kind.drafts, kind.draw)
        for rule in kind.rules:
            kept, first = torch.zeros_like(bound), torch.zeros_like(bound)
            for repeat in range(repeats):
                # Rules share random numbers, which reduces the noise in the differences between rules.
                verdict = rule.verify(draft, p, live.noise(len(kinds) * (1 + repeat) + index))
                kept += verdict.accepted / repeats
                first += (verdict.accepted > 0) / repeats
                if kind is kinds[-1] and rule is kind.rules[0] and repeat == 0:
                    chain_verdicts.append((drafted, verdict))
            exact = closed_forms.acceptance(rule.name, after, root, kind.drafts, kind.draw)
            if rule.name == "block" and kind.growth.max_nodes > 1:
                exact = None  # block verification also depends on the tokens after the first
            samples[kind.name, rule.name].append(RuleSample(kept, first, exact, bound))
    live.advance(*chain_verdicts[0])


def exceeds(bound: Tensor, first: Tensor, formula: Tensor | None) -> bool:
    """Return whether a rule accepts more than the bound, all [N] per context: by formula, or beyond the error."""
    return Mean.of(bound - first).below_zero or (formula is not None and bool((formula > bound + 1e-6).any()))


def _compare(
    kinds: list[DrawKind], samples: dict[tuple[str, str], list[RuleSample]], sampling: SamplingParams
) -> RuleComparison:
    rows, broken = [], []
    kept: dict[tuple[str, str], Tensor] = {}
    for kind in kinds:
        for rule in kind.rules:
            rule_samples = samples[kind.name, rule.name]
            kept[kind.name, rule.name] = torch.cat([sample.kept for sample in rule_samples])
            first = torch.cat([sample.first for sample in rule_samples])
            bound = torch.cat([sample.bound for sample in rule_samples])
            exact = [sample.exact for sample in rule_samples if sample.exact is not None]
            uses_whole_tree = rule.name == "traversal" and kind.growth.max_nodes > kind.drafts
            formula = torch.cat(exact) if len(exact) == len(rule_samples) and not uses_whole_tree else None
            row = kind.result(rule, Mean.of(1 + kept[kind.name, rule.name]), first, formula, bound)
            rows.append(row)
            if exceeds(bound, first, formula):
                broken.append(row.above)
    for draw, better, worse in _NEVER_LESS:
        gain = Mean.of(kept[draw, better] - kept[draw, worse])
        if gain.below_zero:
            broken.append(f"{better} on {draw} keeps {-gain.value:.4f} tokens per step less than {worse}")
    return RuleComparison(sampling.temperature, sampling.top_p, len(next(iter(kept.values()))), rows, broken)
