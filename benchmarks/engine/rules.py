"""``osd bench rules``: draft tokens kept by each verification rule and by each growth policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.engine import closed_forms, growth
from benchmarks.engine.live import Drafted, Live
from benchmarks.engines import CONTEXT, Pair, check_draft, load_pair, loading, short_enough
from benchmarks.options import Contexts, Depth, Draft, Drafts, Prompts, TopP
from benchmarks.turns import Mean
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Bars, Json, Svg, Table, check_files, conclude, say
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
_ON_CHAINS = ("chain", "block", "naive")  # siblings, k_seq and greedy_multidraft are chain there, and traversal block
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
            help="rules: every verification rule on the same drafts; growth: trees and chains of one size, drafted at "
            "the same places. May be given again; both by default.",
            metavar="PART",
        ),
    ] = None,
    temperature: Annotated[
        list[float],
        typer.Option("--temperature", min=0, max=2, help="May be given again; rules are compared above 0."),
    ] = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    drafts: Drafts = 3,
    depth: Depth = 3,
    budget: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each draft whose growth is compared.")] = 8,
    contexts: Contexts = 32,
    json_file: Json = None,
    plot: Svg = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare verification rules and growth policies on one text.

    Ends with 1 when block keeps less than chain, traversal less than siblings, or a rule more than the bound.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot)
    check_draft(draft)
    chosen = parts or list(_PARTS)
    for part in chosen:
        if part not in _PARTS:
            fail(f"--part must be one of {', '.join(_PARTS)}, not {part}")
    plan, grown = Plan(drafts, depth, contexts), growth.Plan(budget, budget, contexts)
    with stop_signals():
        with loading():
            texts = load(prompts)[: 4 * contexts]
            nodes = max(len(plan.paths), depth, budget)
            pair = load_pair(settings, draft, slots=plan.batch, context=CONTEXT, nodes=nodes)
        several_cores(settings.engine.threads)
        asked = short_enough(pair.tokenizer, texts, _LONGEST_PROMPT, prompts)
        sampling = [SamplingParams(temperature=one, top_p=top_p) for one in temperature]
        found = [measure(pair, asked, one, plan) for one in sampling if "rules" in chosen and one.temperature > 0]
        trees = [growth.measure(pair, asked, one, grown) for one in sampling if "growth" in chosen]
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": prompts, "depth": depth}
    report(found, {**about, "growth": [asdict(one) for one in trees]}, json_file, plot, map(growth.table, trees))


@dataclass(frozen=True)
class Row:
    """One rule on the drafts of one draw.

    ``length`` tokens are kept in a step, the bonus token included; ``first`` says how often one of the drafts of the
    first token is, as measured, ``exact`` the same by formula where there is one; no rule surpasses ``bound``.
    """

    draw: str
    drafts: int
    rule: str
    length: Mean | None
    first: Mean
    exact: float | None
    bound: float

    @property
    def acceptance(self) -> float:
        """Acceptance of the first token: by formula, else as measured."""
        return self.first.value if self.exact is None else self.exact

    @property
    def gap(self) -> float:
        """How much the best rule could accept more."""
        return self.bound - self.acceptance

    @property
    def above(self) -> str:
        """The sentence for a rule that accepts more than the bound."""
        return f"{self.rule} on {self.draw} accepts {self.acceptance:.4f}, above the bound {self.bound:.4f}"


@dataclass(frozen=True)
class Comparison:
    """The rows of one sampling setting over ``contexts``, and a sentence for everything that should not be."""

    temperature: float
    top_p: float
    contexts: int
    rows: list[Row]
    broken: list[str]

    @property
    def title(self) -> str:
        """The setting in words."""
        limit = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{limit}, {self.contexts} contexts"

    def table(self) -> Table:
        """Make a table of the rows."""
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
        """Return all of it, as JSON."""
        return {**asdict(self), "rows": [{**asdict(row), "gap": row.gap} for row in self.rows]}


def report(
    found: Sequence[Comparison],
    about: Mapping[str, object],
    json_file: Path | None,
    plot: Path | None,
    more: Iterable[Table] = (),
) -> None:
    """Print the tables, write the files, and end with 1 when something is as it should not be."""
    tables = [*(one.table() for one in found), *more]
    bars = [
        Bars(
            f"{one.title}: first tokens accepted; the line is what no rule surpasses",
            [(f"{row.draw}, {row.drafts}: {row.rule}", row.acceptance, row.bound) for row in one.rows],
        )
        for one in found
    ]
    conclude(tables, {**about, "tables": [one.figures() for one in found]}, json_file, plots=bars, plot=plot)
    broken = [f"{one.title}: {sentence}" for one in found for sentence in one.broken]
    for sentence in broken:
        say(f"osd: {sentence}")
    if broken:
        raise typer.Exit(1)


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
            check_compatible(growth, rule)
        except IncompatibleError:
            continue
        if not rule.chains_only:
            yield rule


def measure(
    pair: Pair,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    plan: Plan,
) -> Comparison:
    """Decode ``prompts`` by the chain rule, and at each place draft in every way and verify by every rule.

    Args:
        pair: with as many slots as the plan's batch.
        prompts: taken in order, and from the start again.
        sampling: of all sequences; a temperature above 0.
        plan: how much.
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
            say(f"temperature {sampling.temperature:g}: {done} of {plan.contexts} contexts")
        live.close()
        number += 1
    return _compared(ways, samples, sampling)


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


def _compared(ways: list[Kind], samples: dict[tuple[str, str], list[Sample]], sampling: SamplingParams) -> Comparison:
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
            if Mean.of(bound - first).below_zero or (formula is not None and bool((formula > bound + 1e-6).any())):
                broken.append(row.above)
    for draw, more, less in _NEVER_LESS:
        gain = Mean.of(kept[draw, more] - kept[draw, less])
        if gain.below_zero:
            broken.append(f"{more} on {draw} keeps {-gain.value:.4f} tokens a round less than {less}")
    return Comparison(sampling.temperature, sampling.top_p, len(next(iter(kept.values()))), rows, broken)
