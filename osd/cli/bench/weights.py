"""``osd bench weights``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import CONTEXT, Json, Prompts, Tokens, check_output, loading, running, say, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import NoDrafterSettings


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
    from dataclasses import asdict

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
