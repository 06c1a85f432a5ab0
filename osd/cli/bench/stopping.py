"""``osd bench stopping``: where chains end, and where they should."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Turns, say
from osd.cli.bench.recorded import (
    Interval,
    Kind,
    Markdown,
    Minutes,
    Passes,
    Records,
    Streams,
    Tokens,
    Unseen,
    check_files,
    check_kinds,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import AcceptanceHeadSettings, drafter_of


def stopping(
    stream: Streams,
    drafter: Kind = "eagle",
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 6.0,
    interval: Interval = 8,
    depth: Annotated[int, typer.Option(min=2, max=8, help="Tokens of the longest draft.")] = 6,
    turns: Turns = 15,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare where chains end: at a fixed length, by confidence, by an acceptance head, and where a rejection comes.

    A drafter learns each stream online, its acceptance head beside it. All then draft with its weights, greedily and
    ungoverned, on prompts that it has not seen. The oracle knows from an earlier run what the target will reject.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, None, markdown)
    check_kinds([drafter])
    if turns > unseen:
        fail(f"--turns must be at most --unseen {unseen}, not {turns}")
    from benchmarks.adaptation import stopping as bench
    from benchmarks.adaptation.adapt import ONLINE
    from benchmarks.adaptation.kinds import ResultStore, learn
    from benchmarks.pair import BenchError
    from osd.registry.versions import VersionError

    growth = AcceptanceHeadSettings(depth=depth, governed=False)
    settings = settings.model_copy(update={"growth": growth, "verification": None})
    readers = [drafter_of(drafter, settings.drafter)]
    tables, figures = [], {}
    with open_experiment(settings, stream, readers, records, unseen, tokens, minutes) as (experiment, streams):
        recipe = experiment.recipe(passes, interval, 0)
        for one in streams:
            try:
                (learnt,) = learn(experiment, one, drafter, recipe, passes, say, [ONLINE])
                taught = experiment.fresh(drafter)
                ResultStore(experiment, one, drafter, recipe, passes).load(ONLINE, taught)
                found = bench.stopping(experiment, one, taught, depth, turns, say)
            except (BenchError, VersionError) as error:
                fail(error)
            title = f"{one.name}, {drafter}: chains of at most {depth} tokens, medians (least to largest)"
            tables.append(bench.stopping_table(title, found))
            figures[one.name] = {"learnt": asdict(learnt), "ways": [asdict(way) for way in found]}
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    about |= {"drafter": drafter, "records": records, "tokens": tokens, "depth": depth, "turns": turns}
    conclude(tables, (), (), {**about, "streams": figures}, (json_file, None, markdown))
