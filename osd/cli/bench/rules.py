"""``osd bench rules`` and ``osd bench growth``: what is kept of drafts, by rule and by how they grew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.bench.options import (
    CONTEXT,
    Contexts,
    Depth,
    Draft,
    Drafts,
    Json,
    Plot,
    Prompts,
    Temperatures,
    TopP,
    check_draft,
    check_output,
    loading,
    say,
    short_enough,
    show,
    write,
)
from osd.cli.common import ConfigFile, Overrides, settings_of
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from benchmarks.figures import Table
    from benchmarks.pair import Pair
    from benchmarks.rules import Plan
    from osd.config import Settings

_LONGEST_PROMPT = 192  # tokens


def rules(
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    temperature: Temperatures = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    drafts: Drafts = 3,
    depth: Depth = 3,
    contexts: Contexts = 32,
    json_file: Json = None,
    plot: Plot = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare every verification rule, on the same drafts, with the best that any rule could do.

    Ends with 1 when block keeps less than chain, traversal less than siblings, or a rule more than the bound.
    """
    settings = settings_of(config, overrides)
    from benchmarks.rules import Plan

    compare(settings, Plan(drafts, depth, contexts), draft, prompts, temperature, top_p, json_file, plot)


def growth(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    budget: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each draft.")] = 8,
    depth: Annotated[int, typer.Option(min=1, max=32, help="Tokens of the longest path of a tree.")] = 8,
    temperature: Annotated[
        list[float], typer.Option("--temperature", min=0, max=2, help="May be given again for another table.")
    ] = [0.0, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    contexts: Annotated[int, typer.Option(min=8, help="Places of the text, for each temperature.")] = 192,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare trees that grow where the drafter hopes with the best static tree, and with a chain, of the same size."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    from benchmarks.growth import Plan, measure
    from benchmarks.report import growths
    from osd.engine.request import SamplingParams

    plan = Plan(budget=budget, depth=depth, contexts=contexts)
    with stop_signals():
        pair, asked = load(settings, draft, prompts, plan.batch, budget)
        found = [measure(pair, asked, SamplingParams(temperature=t, top_p=top_p), plan, say) for t in temperature]
    for comparison in found:
        show(growths(comparison))
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": prompts, "plan": asdict(plan)}
    write(json_file, {**about, "tables": [asdict(comparison) for comparison in found]})


def compare(
    settings: Settings,
    plan: Plan,
    draft: str,
    source: str,
    temperatures: Sequence[float],
    top_p: float,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Measure on live models and report."""
    check_output(json_file, plot)
    from benchmarks.rules import measure
    from osd.engine.request import SamplingParams

    with stop_signals():
        nodes = max(len(plan.paths), plan.depth)
        pair, prompts = load(settings, draft, source, plan.batch, nodes, 4 * plan.contexts)
        tables = []
        for temperature in temperatures:
            sampling = SamplingParams(temperature=temperature, top_p=top_p)

            def report(done: int, temperature: float = temperature) -> None:
                say(f"temperature {temperature:g}: {done} of {plan.contexts} contexts")

            tables.append(measure(pair, prompts, sampling, plan, report))
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": source, "depth": plan.depth}
    conclude(tables, about, json_file, plot)


def load(
    settings: Settings, draft: str, source: str, batch: int, nodes: int, texts: int | None = None
) -> tuple[Pair, list[tuple[int, ...]]]:
    """The models and the prompts, the first ``texts`` of them at most, or the end of the command."""
    from benchmarks.pair import load_pair
    from osd.runtime.device import several_cores
    from osd.traffic import load

    check_draft(draft)
    with loading():
        prompts = load(source)[:texts]
        pair = load_pair(settings, draft, slots=batch, context=CONTEXT, nodes=nodes)
    several_cores(settings.engine.threads)
    return pair, short_enough(pair.tokenizer, prompts, _LONGEST_PROMPT, source)


def conclude(tables: Sequence[Table], about: Mapping[str, object], json_file: Path | None, plot: Path | None) -> None:
    """Show the tables, write the files, and end with 1 when something is as it should not be."""
    from rich.console import Console

    from benchmarks import report

    report.show(Console(highlight=False), tables)
    if json_file is not None:
        report.write_json(json_file, about, tables)
    if plot is not None:
        report.write_plot(plot, tables)
    broken = [f"{table.title}: {sentence}" for table in tables for sentence in table.broken]
    for sentence in broken:
        typer.echo(f"osd: {sentence}", err=True)
    if broken:
        raise typer.Exit(1)
