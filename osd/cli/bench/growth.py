"""``osd bench growth``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import (
    CONTEXT,
    Draft,
    Json,
    Prompts,
    TopP,
    check_draft,
    check_output,
    loading,
    say,
    show,
    write,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of, stop_signals

_LONGEST_PROMPT = 192  # tokens


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
    from dataclasses import asdict

    from benchmarks.growth import Plan, measure
    from benchmarks.pair import encode, load_pair
    from benchmarks.report import growths
    from osd.engine.request import SamplingParams
    from osd.runtime.device import several_cores
    from osd.traffic import load

    check_draft(draft)
    plan = Plan(budget=budget, depth=depth, contexts=contexts)
    with loading():
        texts = load(prompts)
        pair = load_pair(settings, draft, slots=plan.batch, context=CONTEXT, nodes=budget)
    several_cores(settings.engine.threads)
    asked = encode(pair.tokenizer, texts, _LONGEST_PROMPT)
    if not asked:
        fail(f"--prompts: {prompts} holds no prompt of at most {_LONGEST_PROMPT} tokens")
    with stop_signals():
        found = [measure(pair, asked, SamplingParams(temperature=t, top_p=top_p), plan, say) for t in temperature]
    for comparison in found:
        show(growths(comparison))
    about = {"target": settings.target.source, "draft": pair.draft, "prompts": prompts, "plan": asdict(plan)}
    write(json_file, {**about, "tables": [asdict(comparison) for comparison in found]})
