"""``osd bench drafters``: every kind of drafter on one stream."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Plot, say
from osd.cli.bench.recorded import (
    Interval,
    Kinds,
    Markdown,
    Minutes,
    Most,
    Passes,
    Records,
    Tokens,
    Unseen,
    check_files,
    check_kinds,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import TRAINED_SETTINGS, ChainSettings, drafter_of


def drafters(
    stream: Annotated[Path, typer.Option(help="JSON lines of prompts.", metavar="FILE")],
    drafter: Kinds = None,
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 6.0,
    most: Most = 12.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of the chains that acceptance is told of.")] = 4,
    turns: Annotated[
        int, typer.Option(min=0, help="Unseen prompts to decode, to take medians of; 0 to learn alone.")
    ] = 9,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Plot = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare every kind of drafter on one stream: frozen after a tenth of it, learning online, distilled on all of it.

    What each accepts of chains that nothing governs, by depth, and what its training took; then, alone and beside
    recall, as the settings say that drafts grow and are governed: speed beside plain decoding, greedily and at
    temperature 1, tokens, rows and draft calls of a forward. What was learnt and timed is kept in the home directory: a
    command that was cut off goes on, and kinds can be taken one at a time.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    if turns > unseen:
        fail(f"--turns must be at most --unseen {unseen}, not {turns}")
    kinds = check_kinds(drafter)
    from benchmarks.adaptation import kinds as bench
    from benchmarks.adaptation.kinds_tables import (
        NOTES,
        beside_recall_table,
        decoded_tables,
        kinds_plot,
        learnt_table,
    )
    from benchmarks.pair import BenchError
    from osd.registry.versions import VersionError

    grown = settings.model_copy(update={"growth": ChainSettings(depth=depth, governed=False), "verification": None})
    # Of all kinds, so that one recording does for those of any command.
    readers = [drafter_of(kind, settings.drafter) for kind in TRAINED_SETTINGS]
    learnt, decoded = [], {}
    with open_experiment(grown, [stream], readers, records, unseen, tokens, minutes) as (experiment, (recorded,)):
        recipe = experiment.recipe(passes, interval, 0)
        try:
            for kind in kinds:
                learnt += bench.learn(experiment, recorded, kind, recipe, most, say)
                if turns:
                    decoded[kind] = bench.decode(experiment, recorded, kind, recipe, most, settings, turns, say)
        except (BenchError, VersionError) as error:
            fail(error)
    tables = [learnt_table(stream.stem, unseen, learnt)]
    if turns:
        tables += [*decoded_tables(stream.stem, decoded), beside_recall_table(stream.stem, decoded)]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes, "most": most}
    about |= {"records": records, "tokens": tokens, "depth": depth, "growth": settings.growth.model_dump()}
    figures = {
        **about,
        "learnt": [asdict(one) for one in learnt],
        "decoded": {kind: [asdict(one) for one in ways] for kind, ways in decoded.items()},
    }
    conclude(tables, [kinds_plot(stream.stem, learnt)], NOTES, figures, (json_file, plot, markdown))
