"""``osd bench adapt``, ``shift``, ``ablate`` and ``poison``: what online distillation earns on recorded streams."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Plot, say
from osd.cli.bench.recorded import (
    Interval,
    Kind,
    Kinds,
    Markdown,
    Minutes,
    Most,
    Passes,
    Records,
    Seeds,
    Shares,
    Streams,
    Tokens,
    Unseen,
    check_files,
    check_kinds,
    conclude,
    open_experiment,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
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


def shift(
    stream: Streams,
    drafter: Kinds = None,
    records: Records = 200,
    tokens: Tokens = 48,
    share: Shares = [0.3, 0.5, 0.7, 1.0],  # noqa: B006 - typer reads it and changes nothing
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
    """Let streams arrive one after the other: trough, recovery, and drafters distilled on a share of all beforehand."""
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    kinds = check_kinds(drafter)
    if len(stream) < 2:
        fail("--stream must be given at least twice: a shift has a before and an after")
    from benchmarks.adaptation.shift import PAPER
    from benchmarks.adaptation.shift import shift as run
    from benchmarks.adaptation.tables import shift_plot, shift_tables

    tables, plots, figures = [], [], []
    for kind in kinds:
        with open_experiment(settings, stream, [drafter_of(kind, settings.drafter)], records, 0, tokens, minutes) as (
            experiment,
            streams,
        ):
            recipe = experiment.recipe(passes, interval, 0)
            found = [
                run(experiment, streams, kind, replace(recipe, seed=seed), share, most, say) for seed in range(seeds)
            ]
            tables += shift_tables(found)
            plots.append(shift_plot(found[0], {one.name: len(one.arriving) for one in streams}))
            figures += [asdict(result) for result in found]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    conclude(tables, plots, [PAPER], {**about, "runs": figures}, (json_file, plot, markdown))


def ablate(
    stream: Streams,
    ablation: Annotated[
        list[str] | None,
        typer.Option(
            help="divergence, losses, samples, positions, interval, products, unroll, gate, learning_rate, capture, "
            "passes or domains; all by default.",
            metavar="NAME",
        ),
    ] = None,
    drafter: Kind = "eagle",
    records: Records = 120,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    interval: Interval = 8,
    seeds: Seeds = 3,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    plot: Plot = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Learn the first stream with one setting changed at a time; domains compares one drafter with one per stream."""
    settings = settings_of(config, overrides)
    check_files(json_file, plot, markdown)
    check_kinds([drafter])
    from benchmarks.adaptation import ablate as bench
    from benchmarks.adaptation.tables import ablate_plot, ablate_table

    names = (*bench.ABLATIONS, *(["domains"] if len(stream) > 1 else []))
    for name in ablation or ():
        if name not in (*bench.ABLATIONS, "domains"):
            fail(f"--ablation must be one of {', '.join(bench.ABLATIONS)}, domains, not {name}")
        if name not in names:
            fail("--ablation domains needs --stream at least twice")
    tables, plots, figures = [], [], {}
    readers = [drafter_of(drafter, settings.drafter)]
    with open_experiment(settings, stream, readers, records, unseen, tokens, minutes) as (experiment, streams):
        recipe = experiment.recipe(passes, interval, 0)
        for name in ablation or names:
            if name == "domains":
                learned, found = streams, bench.domains(experiment, streams, drafter, recipe, range(seeds), say)
            else:
                learned, found = (
                    streams[:1],
                    bench.ablate(experiment, streams[0], drafter, recipe, name, range(seeds), say),
                )
            title = f"{name}, {drafter}, {records} records of {' and of '.join(one.name for one in learned)}"
            tables.append(ablate_table(title, found))
            plots.append(ablate_plot(title, found))
            figures[name] = [asdict(variant) for variant in found]
    about = {"target": settings.target.source, "trainer": settings.trainer.model_dump(), "passes": passes}
    conclude(tables, plots, (), {**about, "ablations": figures}, (json_file, plot, markdown))


def poison(
    stream: Streams,
    drafter: Kind = "eagle",
    share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Of all traffic, that is random text.")] = 0.3,
    records: Records = 200,
    unseen: Unseen = 40,
    tokens: Tokens = 48,
    passes: Passes = 8.0,
    interval: Interval = 8,
    trials: Annotated[int, typer.Option(min=3, help="Corrupted candidates that are brought to the gate.")] = 100,
    turns: Annotated[int, typer.Option(min=1, help="To take the median of tokens/s of.")] = 5,
    minutes: Minutes = 10.0,
    json_file: Json = None,
    markdown: Markdown = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Mix random text into a stream, and bring corrupted candidates to the gate. Ends with 1 when one is promoted."""
    settings = settings_of(config, overrides)
    check_files(json_file, None, markdown)
    check_kinds([drafter])
    if len(stream) != 1:
        fail("--stream must be given once")
    from benchmarks.adaptation import poison as bench
    from benchmarks.adaptation.served import served
    from benchmarks.adaptation.tables import corrupted_table, poison_table, served_table

    readers = [drafter_of(drafter, settings.drafter)]
    with open_experiment(settings, stream, readers, records, unseen, tokens, minutes) as (experiment, streams):
        recipe = experiment.recipe(passes, interval, 0)
        wanted = bench.beside(records, share)
        poisoned = experiment.recorded(bench.POISON, experiment.asked(bench.POISON, bench.prompts(wanted), wanted))
        taught = experiment.fresh(drafter)
        clean, poisoned = experiment.read_by(taught, streams[0]), experiment.states_for(taught, poisoned)
        found = bench.poison(experiment, clean, poisoned, drafter, recipe, say)
        taught.load_weights(found[0].weights)
        promoted = bench.corrupted(experiment, clean, taught, recipe, trials)
        taught.load_weights(found[1].weights)
        sent = bench.traffic(clean.unseen, poisoned, share)
        speed = served(experiment, taught, sent, turns, say)
    tables = [
        poison_table(f"{share:.0%} poison in {clean.name}, {drafter}", found),
        corrupted_table(promoted),
        served_table(f"governed drafts on {len(sent)} prompts of the poisoned stream, learned with anchors", speed),
    ]
    figures = {
        "target": settings.target.source,
        "trainer": settings.trainer.model_dump(),
        "clean": {one.way: asdict(one.clean) for one in found},
        "corrupted": promoted,
        "served": asdict(speed),
    }
    conclude(tables, (), (), figures, (json_file, None, markdown))
    if any(through for through, _ in promoted.values()):
        fail_promoted = sum(through for through, _ in promoted.values())
        typer.echo(f"osd: {fail_promoted} corrupted candidates were promoted", err=True)
        raise typer.Exit(1)
