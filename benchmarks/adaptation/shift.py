"""Sharp shifts: one stream after the other, against drafters distilled on a share of everything and then frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.learner import Online, Recipe, Work, copied, distill
from benchmarks.adaptation.offline_acceptance import Counts, total

TROUGH = 20
"""Records after a switch within which the trough is looked for, and records of one look."""

PAPER = (
    "Paper (arXiv 2310.07177, read off its figures; 2,000 records each, gsm8k, spider, finance, python): troughs after "
    "a switch .457, .598, .508; last quarters .730, .689, .658, .627, level with a drafter distilled on 70 to 100%."
)


@dataclass(frozen=True)
class Phase:
    """One stream of a sequence, in agreement: accepted / tested.

    ``trough`` is the lowest of the looks at the first records, ``last`` the last quarter, ``recovered`` the records
    until four fifths of the way from trough to ``last`` are made (None: there is no rise), ``frozen`` [share] the last
    quarter of the drafters that were distilled before.
    """

    stream: str
    trough: float
    last: float
    recovered: int | None
    frozen: dict[float, float]


@dataclass(frozen=True)
class Shifted:
    """One kind of drafter with one seed; ``online`` and ``frozen`` [share] hold the counts of every record in order."""

    kind: str
    seed: int
    phases: list[Phase]
    online: list[Counts]
    frozen: dict[float, list[Counts]]
    work: dict[str, Work]


def shift(
    experiment: Experiment,
    streams: Sequence[Stream],
    kind: str,
    recipe: Recipe,
    shares: Sequence[float],
    most: float,
    report: Callable[[str], None] = lambda step: None,
) -> Shifted:
    """Let the streams arrive one after the other.

    Args:
        experiment: where drafters come from.
        streams: in the order of their coming.
        kind: of the drafter.
        recipe: how online learns.
        shares: of each stream, its first records, that the frozen drafters are distilled on.
        most: passes of the frozen drafters.
        report: told what is done.
    """
    drafter = experiment.fresh(kind)
    start, streams = copied(drafter), [experiment.read_by(drafter, stream) for stream in streams]
    offline = experiment.offline_acceptance(drafter, *streams)
    everything = [trace for stream in streams for trace in stream.arriving]
    frozen: dict[float, list[Counts]] = {}
    work: dict[str, Work] = {}
    for share in shares:
        taught = [t for stream in streams for t in stream.arriving[: max(round(share * len(stream.arriving)), 1)]]
        report(f"{kind}: distilling on {share:.0%} of everything, {len(taught)} records")
        drafter.load_weights(start)
        work[f"{share:.0%}"] = distill(drafter, taught, recipe, most)
        frozen[share] = [one.counts for one in offline.measure(drafter.weights(), everything)]
    drafter.load_weights(start)
    learner = Online(drafter, recipe, offline)

    def tell(done: int) -> None:
        if done % 40 == 0:
            report(f"{kind}: {done} of {len(everything)} records")

    online = learner.serve(everything, tell)
    work["online"] = learner.work
    phases, begin = [], 0
    for stream in streams:
        end = begin + len(stream.arriving)
        phases.append(phase(stream.name, online[begin:end], {s: counts[begin:end] for s, counts in frozen.items()}))
        begin = end
    return Shifted(kind, recipe.seed, phases, online, frozen, work)


def phase(stream: str, online: Sequence[Counts], frozen: dict[float, list[Counts]]) -> Phase:
    """What became of one stream."""
    look = min(TROUGH, len(online))
    levels = [total(online[end - look : end]).agreement for end in range(look, len(online) + 1)]
    quarter = max(len(online) // 4, 1)
    trough, last = min(levels[:look]), total(online[-quarter:]).agreement
    deepest = levels.index(trough)
    needed = trough + 0.8 * (last - trough)
    recovered = next((look + deepest + n for n, level in enumerate(levels[deepest:]) if level >= needed), None)
    return Phase(
        stream=stream,
        trough=trough,
        last=last,
        recovered=recovered if last > trough else None,
        frozen={share: total(counts[-quarter:]).agreement for share, counts in frozen.items()},
    )
