"""``osd bench forward``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import CONTEXT, Draft, Json, check_draft, check_output, loading, say, show, write
from osd.cli.common import ConfigFile, Overrides, settings_of, stop_signals


def forward(
    draft: Draft = "eagle",
    turns: Annotated[int, typer.Option(min=1, help="To take medians of.")] = 15,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Time forwards of 1 to 64 tokens and steps of the drafter, beside the memory's bandwidth."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft)
    from dataclasses import asdict

    from benchmarks.forward import COUNTS, STEPS, measure, table
    from benchmarks.isolated import DRAFT_CONTEXT, on_several_cores
    from benchmarks.pair import find_drafter
    from osd.drafters.autoregressive import autoregressive
    from osd.drafters.session import Runtime
    from osd.runtime.model import SlotModel
    from osd.target.load import resolve
    from osd.target.model import load_model

    with stop_signals():
        with loading():
            directory = resolve(settings.target.source, settings.home_dir)
            drafter, name = find_drafter(settings, draft, directory)
            model = load_model(directory, settings.target.dtype, settings.target.device)
        target = SlotModel(
            model,
            slots=1,
            context=CONTEXT,
            scratch=COUNTS[-1],
            taps=drafter.needs.taps,
            weights=settings.target.weights,
        )
        session = autoregressive(drafter.session(Runtime(1, DRAFT_CONTEXT, STEPS + 1, target.device)))
        found = on_several_cores(lambda: measure(target, drafter, session, turns, say), settings.engine.threads)
    show(table(found))
    write(json_file, {"target": settings.target.source, "draft": name, "turns": turns, **asdict(found)})
