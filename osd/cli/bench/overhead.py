"""``osd bench overhead``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import CONTEXT, Json, TopP, check_output, loading, say, show, write
from osd.cli.common import ConfigFile, Overrides, settings_of, stop_signals


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
    from dataclasses import asdict

    from benchmarks.overhead import measure
    from benchmarks.report import costs
    from osd.engine.request import SamplingParams
    from osd.runtime.device import several_cores
    from osd.runtime.model import SlotModel
    from osd.target.load import resolve
    from osd.target.model import load_model

    with stop_signals():
        with loading():
            model = load_model(resolve(settings.target.source, settings.home_dir), settings.target.dtype, "cpu")
        target = SlotModel(model, slots=batch, context=CONTEXT, scratch=budget + 1)
        several_cores(settings.engine.threads)
        sampling = SamplingParams(temperature=temperature, top_p=top_p)
        found = measure(target, batch, budget, sampling, rounds, say)
    show(costs(found))
    figures = [{**asdict(cost), "share": {rule: cost.share(rule) for rule in cost.verify}} for cost in found]
    write(json_file, {"target": settings.target.source, "batch": batch, "budget": budget, "costs": figures})
