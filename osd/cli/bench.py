"""``osd bench``: measure the library on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, Overrides, fail, settings_of, stop_signals

if TYPE_CHECKING:
    from benchmarks.figures import Table
    from benchmarks.pair import Pair
    from benchmarks.rules import Plan
    from osd.config import Settings

app = typer.Typer(help="Measure rules and overheads on this machine.", no_args_is_help=True)

Draft = Annotated[
    str,
    typer.Option(
        help="skip_layers: the target without some middle layers; registry: the newest version of the domain; "
        "language_model or eagle: a fresh one, as the settings say.",
        metavar="KIND",
    ),
]
Prompts = Annotated[str, typer.Option(help="stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0.01, max=2, help="May be given again for another table.")
]
TopP = Annotated[float, typer.Option(min=0.01, max=1, help="Of both target and drafter.")]
Drafts = Annotated[int, typer.Option(min=1, max=8, help="Drafts of the first token.")]
Depth = Annotated[int, typer.Option(min=1, max=8, help="Tokens of a path.")]
Contexts = Annotated[int, typer.Option(min=2, help="Places of the text, for each temperature.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture here, as SVG.", metavar="FILE")]

_CONTEXT, _LONGEST_PROMPT = 512, 192  # tokens


@app.command()
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
    from osd.engine.request import Sampling

    with stop_signals():
        pair, prompts = load(settings, plan, draft, source)
        tables = []
        for temperature in temperatures:
            sampling = Sampling(temperature=temperature, top_p=top_p)

            def report(done: int, temperature: float = temperature) -> None:
                typer.echo(f"temperature {temperature:g}: {done} of {plan.contexts} contexts", err=True)

            tables.append(measure(pair, prompts, sampling, plan, report))
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": source, "depth": plan.depth}
    conclude(tables, about, json_file, plot)


def load(settings: Settings, plan: Plan, draft: str, source: str) -> tuple[Pair, list[tuple[int, ...]]]:
    """The models and the prompts, or the end of the command."""
    from benchmarks.pair import DRAFTS, BenchError, encode, load_pair
    from osd.target.load import TargetError
    from osd.target.threads import one_core, several_cores
    from osd.traffic import load
    from osd.traffic.prompt import TrafficError

    if draft not in DRAFTS:
        fail(f"--draft must be one of {', '.join(DRAFTS)}, not {draft}")
    one_core()  # loading makes threads of its own
    _quiet()
    try:
        texts = load(source)
        pair = load_pair(settings, draft, slots=plan.batch, context=_CONTEXT, nodes=max(len(plan.paths), plan.depth))
    except (BenchError, TargetError, TrafficError) as error:
        fail(error)
    several_cores(settings.engine.threads)
    prompts = encode(pair.tokenizer, texts[: 4 * plan.contexts], _LONGEST_PROMPT)
    if not prompts:
        fail(f"--prompts: {source} holds no prompt of at most {_LONGEST_PROMPT} tokens")
    return pair, prompts


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def check_output(json_file: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written in the end."""
    for name, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fail(f"{name}: cannot write {file}")
    if plot is not None and plot.suffix != ".svg":
        fail(f"--plot: the name must end with .svg, not {plot.name}")


def conclude(tables: Sequence[Table], about: dict[str, object], json_file: Path | None, plot: Path | None) -> None:
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


@app.command()
def overhead(
    batch: Annotated[int, typer.Option(min=1, max=64, help="Sequences.")] = 8,
    budget: Annotated[int, typer.Option(min=1, max=256, help="Draft tokens of each.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.01, max=2)] = 1.0,
    top_p: TopP = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="To take the median of.")] = 5,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Time growing and verifying, the forwards left out, for every growth policy and rule.

    The distributions are made up, over the target's vocabulary; the target's forward is measured.
    """
    settings = settings_of(config, overrides)
    check_output(json_file, None)
    import json
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.overhead import measure
    from benchmarks.report import costs
    from osd.engine.request import Sampling
    from osd.target.load import TargetError, resolve
    from osd.target.model import SlotModel, load_model
    from osd.target.threads import one_core, several_cores

    one_core()  # loading makes threads of its own
    _quiet()
    with stop_signals():
        try:
            directory = resolve(settings.target.source, settings.home_dir)
        except TargetError as error:
            fail(error)
        model = load_model(directory, settings.target.dtype, "cpu")
        target = SlotModel(model, slots=batch, context=_CONTEXT, scratch=budget + 1)
        several_cores(settings.engine.threads)
        sampling = Sampling(temperature=temperature, top_p=top_p)
        found = measure(target, batch, budget, sampling, rounds, lambda growth: typer.echo(growth, err=True))
    Console(highlight=False).print(costs(found))
    if json_file is not None:
        figures = [{**asdict(cost), "share": {rule: cost.share(rule) for rule in cost.verify}} for cost in found]
        about = {"target": settings.target.source, "batch": batch, "budget": budget, "costs": figures}
        json_file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


@app.command()
def governor(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    cycles: Annotated[int, typer.Option(min=1, help="Of the alternating load.")] = 5,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare the governor with plain decoding and fixed draft lengths while the load goes from 1 to 16 and back."""
    settings = settings_of(config, [*(overrides or ()), "growth.kind=chain", "growth.depth=4"])
    check_output(json_file, None)
    import json
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.governor import Load, measure
    from benchmarks.pair import DRAFTS, BenchError, encode, load_engine
    from benchmarks.report import speeds
    from osd.target.load import TargetError
    from osd.target.threads import one_core
    from osd.traffic import load
    from osd.traffic.prompt import TrafficError

    if draft not in DRAFTS:
        fail(f"--draft must be one of {', '.join(DRAFTS)}, not {draft}")
    plan = Load(cycles=cycles)
    if settings.engine.slots < plan.together:
        fail(f"engine.slots must be at least {plan.together}, not {settings.engine.slots}")
    one_core()  # loading makes threads of its own
    _quiet()
    try:
        texts = load(prompts)
        engine, name = load_engine(settings, draft)
    except (BenchError, TargetError, TrafficError) as error:
        fail(error)
    asked = encode(engine.tokenizer, texts, settings.engine.context - plan.tokens)
    with stop_signals():
        engine.start()
        try:
            found = measure(engine, asked, plan, lambda step: typer.echo(step, err=True))
        finally:
            engine.stop()
    Console(highlight=False).print(speeds(found))
    if json_file is not None:
        about = {"target": settings.target.source, "draft": name, "prompts": prompts, "load": asdict(plan)}
        figures = {**about, "ways": [asdict(speed) for speed in found]}
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@app.command()
def plain(
    prompts: Prompts = "unittest",
    tokens: Annotated[int, typer.Option(min=8, help="Of each completion.")] = 96,
    turns: Annotated[int, typer.Option(min=1, help="To take medians of.")] = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare plain decoding with transformers' generate(), and eight streams with one, taking turns."""
    settings = settings_of(config, [*(overrides or ()), "drafter.kind=none"])
    check_output(json_file, None)
    import json
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.pair import encode, plain_engine
    from benchmarks.plain import measure, ratios
    from benchmarks.report import turns_of
    from osd.target.load import TargetError
    from osd.target.threads import one_core
    from osd.traffic import load
    from osd.traffic.prompt import TrafficError

    one_core()  # loading makes threads of its own
    _quiet()
    try:
        texts = load(prompts)
        engine, directory = plain_engine(settings)
    except (TargetError, TrafficError) as error:
        fail(error)
    asked = encode(engine.tokenizer, texts, settings.engine.context - tokens)
    with stop_signals():
        engine.start()
        try:
            pairs = measure(engine, directory, asked, tokens, turns, lambda step: typer.echo(step, err=True))
        finally:
            engine.stop()
    Console(highlight=False).print(turns_of(pairs))
    if json_file is not None:
        figures = {"target": settings.target.source, "tokens": tokens, "turns": [asdict(pair) for pair in pairs]}
        json_file.write_text(json.dumps({**figures, "ratios": ratios(pairs)}, indent=2) + "\n", encoding="utf-8")
