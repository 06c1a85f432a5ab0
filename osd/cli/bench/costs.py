"""``osd bench forward``, ``overhead`` and ``weights``: what the parts of a round cost, one at a time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import (
    CONTEXT,
    Draft,
    Json,
    Prompts,
    Tokens,
    TopP,
    Turns,
    check_draft,
    check_output,
    loading,
    running,
    say,
    show,
    write,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.signals import stop_signals
from osd.config import NoDrafterSettings


def forward(
    draft: Draft = "eagle",
    turns: Turns = 15,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Time forwards of 1 to 64 tokens and steps of the drafter, beside the memory's bandwidth."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft)
    from benchmarks.forward import COUNTS, STEPS, measure, table
    from benchmarks.isolated import DRAFT_CONTEXT, on_several_cores
    from benchmarks.pair import find_drafter
    from osd.drafters.autoregressive import autoregressive
    from osd.drafters.session import Runtime
    from osd.runtime.model import SlotModel
    from osd.target.load import target_directory
    from osd.target.model import load_model

    with stop_signals():
        with loading():
            directory = target_directory(settings)
            drafter, name = find_drafter(settings, draft, directory)
            model = load_model(directory, settings.target.dtype, settings.target.device)
        taps, weights = drafter.needs.taps, settings.target.weights
        target = SlotModel(model, slots=1, context=CONTEXT, scratch=COUNTS[-1], taps=taps, weights=weights)
        session = autoregressive(drafter.session(Runtime.serving(1, DRAFT_CONTEXT, STEPS + 1, target.device, target)))
        if session.levels is not None:
            fail(f"--draft {draft} drafts all its tokens in one call: there is no further step to time")
        found = on_several_cores(lambda: measure(target, drafter, session, turns, say), settings.engine.threads)
    show(table(found))
    write(json_file, {"target": settings.target.source, "draft": name, "turns": turns, **asdict(found)})


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
    check_output(json_file)
    from benchmarks.overhead import measure
    from benchmarks.report import costs
    from osd.engine.request import SamplingParams
    from osd.runtime.device import several_cores
    from osd.runtime.model import SlotModel
    from osd.target.load import target_directory
    from osd.target.model import load_model

    with stop_signals():
        with loading():
            model = load_model(
                target_directory(settings),
                settings.target.dtype,
                "cpu",
            )
        target = SlotModel(model, slots=batch, context=CONTEXT, scratch=budget + 1)
        several_cores(settings.engine.threads)
        sampling = SamplingParams(temperature=temperature, top_p=top_p)
        found = measure(target, batch, budget, sampling, rounds, say)
    show(costs(found))
    figures = [{**asdict(cost), "share": {rule: cost.share(rule) for rule in cost.verify}} for cost in found]
    write(json_file, {"target": settings.target.source, "batch": batch, "budget": budget, "costs": figures})


def weights(
    prompts: Prompts = "unittest",
    texts: Annotated[int, typer.Option(min=1, help="To compare the weights on.")] = 16,
    tokens: Tokens = 96,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare int8 weights of the target with full ones: quality on texts that it wrote, and the time of a forward."""
    plain = ["target.weights=full", "target.device=cpu", f"engine.context={CONTEXT}"]
    settings = settings_of(config, [*(overrides or ()), *plain])
    settings = settings.model_copy(update={"drafter": NoDrafterSettings()})
    check_output(json_file)
    from benchmarks.pair import encode, plain_engine
    from benchmarks.report import narrowing
    from benchmarks.streams import texts_of
    from benchmarks.weights import quality, speedups
    from osd.engine.request import Request, SamplingParams
    from osd.runtime.device import several_cores
    from osd.runtime.model import SlotModel
    from osd.runtime.native import kernels
    from osd.target.model import load_model
    from osd.traffic import load

    if kernels() is None:
        fail("target.weights int8 needs the kernels that are built for CPUs with AVX2")
    with loading():
        asked = load(prompts)
        engine, directory = plain_engine(settings)
        model = load_model(directory, settings.target.dtype, "cpu")
        narrow = SlotModel(model, slots=1, context=CONTEXT, scratch=1, weights="int8")
    chosen = encode(engine.tokenizer, asked, CONTEXT - tokens)[:texts]
    say(f"drawing {len(chosen)} texts of {tokens} tokens")
    with running(engine):
        sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(len(chosen))]
        requests = [
            Request(str(index), prompt, tokens, one, ignore_eos=True, speculate=False)
            for index, (prompt, one) in enumerate(zip(chosen, sampling, strict=True))
        ]
        written = texts_of(engine, requests)
    several_cores(settings.engine.threads)
    say("reading them with both")
    found, times = quality(engine.target, narrow, written), speedups(engine.target, narrow)
    show(narrowing(found, times))
    write(json_file, {"target": settings.target.source, "quality": asdict(found), "milliseconds": times})
