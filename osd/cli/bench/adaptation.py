"""``osd bench adapt``: what online distillation earns on recorded streams."""

from __future__ import annotations

from dataclasses import asdict, replace

from osd.cli.bench.options import Json, Plot, say
from osd.cli.bench.recorded import (
    Interval,
    Kinds,
    Markdown,
    Minutes,
    Most,
    Passes,
    Records,
    Seeds,
    Streams,
    Tokens,
    Unseen,
    check_files,
    check_kinds,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, settings_of
from osd.config import drafter_of


def adapt(
    stream: Streams,
    drafter: Kinds = None,
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    most: Most = 16.0,
    interval: Interval = 8,
    seeds: Seeds = 1,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Plot = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Follow streams with a drafter frozen after a tenth, one that learns online, and one distilled on everything.

    The target's greedy text is recorded once, under the home directory, and replayed; a recording that was cut off
    goes on where it stopped. Drafts are not governed.
    """
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    kinds = check_kinds(drafter)
    from benchmarks.adaptation.adapt import DIFFERS
    from benchmarks.adaptation.adapt import adapt as run
    from benchmarks.adaptation.tables import adapt_plot, adapt_tables

    tables, plots, figures = [], [], []
    for kind in kinds:
        with open_experiment(
            settings, stream, [drafter_of(kind, settings.drafter)], records, unseen, tokens, minutes
        ) as (experiment, streams):
            recipe = experiment.recipe(passes, interval, 0)
            for one in streams:
                found = [run(experiment, one, kind, replace(recipe, seed=seed), most, say) for seed in range(seeds)]
                tables += adapt_tables(found, 100)
                plots.append(adapt_plot(found[0]))
                figures += [asdict(result) for result in found]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    conclude(tables, plots, [DIFFERS], {**about, "runs": figures}, (json_file, plot, markdown))
