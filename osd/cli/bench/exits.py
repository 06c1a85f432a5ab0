"""``osd bench exits``: behind which layer of the target its first layers should leave it to draft."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Turns, loading, say
from osd.cli.bench.recorded import (
    Interval,
    Markdown,
    Minutes,
    Most,
    Passes,
    Records,
    Streams,
    Tokens,
    Unseen,
    check_files,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import KangarooSettings


def exits(
    stream: Streams,
    layer: Annotated[
        list[int], typer.Option(min=1, help="Target layers that draft; may be given again.", metavar="LAYERS")
    ] = [3, 6, 10],  # noqa: B006 - typer reads it and changes nothing
    records: Records = 120,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    most: Most = 16.0,
    interval: Interval = 8,
    turns: Turns = 9,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a drafter of the target's first layers for each exit, alike, and compare what it accepts and costs.

    The speed-up is over plain decoding of the same prompts, one at a time and taking turns. Drafts are not governed.
    """
    settings = settings_of(config, ["growth.kind=chain", "growth.governed=false", *(overrides or ())])
    check_files(json_file, None, markdown)
    if len(stream) != 1:
        fail("--stream must be given once")
    layers = list(dict.fromkeys(layer))
    from benchmarks.adaptation.exits import exits_table, sweep
    from osd.drafters import DrafterError
    from osd.drafters.shapes import check_exit
    from osd.target.load import target_directory
    from osd.target.model import load_config

    with loading():
        count = load_config(target_directory(settings)).num_hidden_layers
    try:
        for number in layers:
            check_exit(number, count, "--layer")
    except DrafterError as error:
        fail(error)
    readers = [KangarooSettings(exit_layer=number) for number in layers]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    about |= {"growth": settings.growth.model_dump(), "records": records, "tokens": tokens}
    found = []
    with open_experiment(settings, stream, readers, records, unseen, tokens, minutes) as (experiment, streams):
        recipe = experiment.recipe(passes, interval, 0)
        for one in sweep(experiment, streams[0], layers, recipe, most, turns, say):
            found.append(one)
            figures = {**about, "exits": [asdict(one) for one in found]}
            files = json_file, None, markdown
            conclude([exits_table(streams[0].name, found)], (), (), figures, files)  # what is known if it is cut off
