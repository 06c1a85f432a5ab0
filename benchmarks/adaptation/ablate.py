"""Ablations of online learning: one setting at a time, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from benchmarks.adaptation.curves import Spread
from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.kept import KEPT, Make
from benchmarks.adaptation.learner import Online, Recipe, Work, copied
from benchmarks.adaptation.offline_acceptance import Counts, total
from benchmarks.adaptation.samples import Rehearsal
from osd.learning import DIVERGENCES

Change = Callable[[Recipe], Recipe]
Item = TypeVar("Item")


def _trainer(**values: object) -> Change:
    """Other values of ``trainer.*``."""
    return lambda recipe: replace(recipe, settings=recipe.settings.model_copy(update=values))


def _recipe(**values: object) -> Change:
    return lambda recipe: replace(recipe, **values)


def _kept(share: float, make: Make) -> Change:
    """Made anew for each run: what is kept depends on what came before. Fewer records are trained on as much in all."""
    return lambda recipe: replace(recipe, kept=make(recipe.settings.held_out), passes=recipe.passes / share)


ABLATIONS: dict[str, dict[str, Change]] = {
    "divergence": {name: _trainer(divergence=name) for name in DIVERGENCES},
    "losses": {
        "forward KL": _trainer(),
        "LK hybrid": _trainer(divergence="lk_hybrid"),
        "depths by length": _trainer(depths="length"),
        "both": _trainer(divergence="lk_hybrid", depths="length"),
    },
    "samples": {name: _trainer(samples=name) for name in ("teacher", "student", "mixed")},
    "positions": {name: _trainer(positions=name) for name in ("all", "rejected", "weighted")},
    "interval": {f"every {count} records": _recipe(interval=count) for count in (1, 8, 32)},
    "products": {
        "float32": _trainer(precision="float32", negatives=0),
        "bfloat16": _trainer(precision="bfloat16", negatives=0),
        "float32, 512 negatives": _trainer(precision="float32", negatives=512),
        "bfloat16, 512 negatives": _trainer(precision="bfloat16", negatives=512),
    },
    "unroll": {f"{depth} steps": _trainer(unroll=depth) for depth in (1, 2, 3, 4)},
    "gate": {"through the gate": _recipe(gated=True), "without": _recipe(gated=False)},
    "learning_rate": {f"{rate:g}": _trainer(learning_rate=rate) for rate in (3e-4, 1e-3, 3e-3)},
    "capture": {name: _kept(share, make) for name, (share, make) in KEPT.items()},
    "passes": {f"{count:g} passes": _recipe(passes=count) for count in (2.0, 4.0, 8.0)},
}
"""What may be compared on one stream; the domains are compared in ``domains``."""


@dataclass(frozen=True)
class Variant:
    """One value of a setting over all seeds: agreement (accepted / tested) while it learned and on unseen records.

    ``curve`` has the counts of each record that arrived, all seeds together, in the order in which they came.
    """

    name: str
    arriving: Spread
    unseen: Spread
    length: Spread
    work: list[Work]
    curve: list[Counts]


def ablate(
    experiment: Experiment,
    stream: Stream,
    kind: str,
    recipe: Recipe,
    ablation: str,
    seeds: Sequence[int],
    report: Callable[[str], None] = lambda step: None,
) -> list[Variant]:
    """Learn a stream online with each value of a setting and each seed; the seed is that of the replay's samples."""
    found = []
    drafter = experiment.fresh(kind)
    start, stream = copied(drafter), experiment.read_by(drafter, stream)
    offline = experiment.offline_acceptance(drafter, stream)
    with ExitStack() as ends:
        draw = None
        if ablation == "samples":
            draw = ends.enter_context(Rehearsal(experiment.setup, experiment.fresh(kind), recipe.depth)).draw
        for name, change in ABLATIONS[ablation].items():
            arriving, unseen, work = [], [], []
            for seed in seeds:
                report(f"{ablation}: {name}, seed {seed}")
                drafter.load_weights(start)
                online = Online(drafter, replace(change(recipe), seed=seed), offline, draw)
                arriving.append(online.serve(stream.arriving))
                unseen.append(total([one.counts for one in offline.measure(online.in_service, stream.unseen)]))
                work.append(online.work)
            found.append(_variant(name, arriving, unseen, work))
    return found


def domains(
    experiment: Experiment,
    streams: Sequence[Stream],
    kind: str,
    recipe: Recipe,
    seeds: Sequence[int],
    report: Callable[[str], None] = lambda step: None,
) -> list[Variant]:
    """One drafter for streams that arrive in turns, record by record, against one drafter for each of them."""
    drafter = experiment.fresh(kind)
    start, streams = copied(drafter), [experiment.read_by(drafter, stream) for stream in streams]
    offline = experiment.offline_acceptance(drafter, *streams)
    turns = _in_turns([stream.arriving for stream in streams])
    rest = [trace for stream in streams for trace in stream.unseen]
    ways: dict[str, tuple[list[list[Counts]], list[Counts], list[Work]]] = {}
    for seed in seeds:
        report(f"one drafter, seed {seed}")
        drafter.load_weights(start)
        one = Online(drafter, replace(recipe, seed=seed), offline)
        mixed = one.serve(turns), total([x.counts for x in offline.measure(one.in_service, rest)])
        arriving, unseen, work = [], [], []
        for stream in streams:
            report(f"a drafter of {stream.name}, seed {seed}")
            drafter.load_weights(start)
            own = Online(drafter, replace(recipe, seed=seed), offline)
            arriving.append(own.serve(stream.arriving))
            unseen += [x.counts for x in offline.measure(own.in_service, stream.unseen)]
            work.append(own.work)
        for name, here, there, done in (
            ("one for all", mixed[0], mixed[1], [one.work]),
            ("one a domain", _in_turns(arriving), total(unseen), work),
        ):
            kept = ways.setdefault(name, ([], [], []))
            kept[0].append(here)
            kept[1].append(there)
            kept[2].extend(done)
    return [_variant(name, *kept) for name, kept in ways.items()]


def _in_turns(streams: Sequence[Sequence[Item]]) -> list[Item]:
    """The first of each stream, the second of each, and so on; all are equally long."""
    return [one for group in zip(*streams, strict=True) for one in group]


def _variant(name: str, arriving: list[list[Counts]], unseen: list[Counts], work: list[Work]) -> Variant:
    """Of each seed: ``arriving`` has the counts of every record in order, ``unseen`` those of all unseen records."""
    return Variant(
        name,
        Spread(tuple(total(counts).agreement for counts in arriving)),
        Spread(tuple(counts.agreement for counts in unseen)),
        Spread(tuple(counts.acceptance_length for counts in unseen)),
        work,
        [total(seeds) for seeds in zip(*arriving, strict=True)],
    )
