"""``osd bench rules``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of, stop_signals

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
        pair, prompts = load(settings, plan, draft, source)
        tables = []
        for temperature in temperatures:
            sampling = SamplingParams(temperature=temperature, top_p=top_p)

            def report(done: int, temperature: float = temperature) -> None:
                say(f"temperature {temperature:g}: {done} of {plan.contexts} contexts")

            tables.append(measure(pair, prompts, sampling, plan, report))
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": source, "depth": plan.depth}
    conclude(tables, about, json_file, plot)


def load(settings: Settings, plan: Plan, draft: str, source: str) -> tuple[Pair, list[tuple[int, ...]]]:
    """The models and the prompts, or the end of the command."""
    from benchmarks.pair import encode, load_pair
    from osd.runtime.device import several_cores
    from osd.traffic import load

    check_draft(draft)
    with loading():
        texts = load(source)
        pair = load_pair(settings, draft, slots=plan.batch, context=CONTEXT, nodes=max(len(plan.paths), plan.depth))
    several_cores(settings.engine.threads)
    prompts = encode(pair.tokenizer, texts[: 4 * plan.contexts], _LONGEST_PROMPT)
    if not prompts:
        fail(f"--prompts: {source} holds no prompt of at most {_LONGEST_PROMPT} tokens")
    return pair, prompts


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
