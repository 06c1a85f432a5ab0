"""How fast a drafter follows a stream: frozen after a tenth of it, learning online, and distilled on all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.adaptation.experiment import Experiment, Stream, first
from benchmarks.adaptation.learner import Online, Recipe, Work, copied, distill
from benchmarks.adaptation.offline_acceptance import Counts, total

FROZEN, ONLINE, OFFLINE = "frozen", "online", "offline"
WAYS = (FROZEN, ONLINE, OFFLINE)

TENTH = 0.1
"""What the frozen drafter is distilled on, as in the paper."""

PAPER = {
    "spider": (0.442, 0.350, 0.754, 0.76, (90, 1140, 2820)),
    "gsm8k": (0.632, 0.660, 0.757, 0.75, (780, 2760, 3720)),
}
"""Liu et al., "Online Speculative Decoding" (arXiv 2310.07177), LLaMA-160M for Vicuna-7B: frozen, online at first and
at last, offline; records to 50, 80 and 90% of the gain. Read off its figures; offline is from its table."""

DIFFERS = (
    "The paper's drafter is a language model of 160M for a target of 7B, k = 5, over 7,000 to 10,000 records; here a "
    "smaller drafter follows a smaller target, which answers greedily, and begins with next to no knowledge."
)


@dataclass(frozen=True)
class Adapted:
    """One kind of drafter on one stream with one seed.

    ``arriving`` [way] are the counts of each record when it came; ``unseen`` [way] those on records that nobody
    trained on, with the drafters as they were in the end.
    """

    stream: str
    kind: str
    seed: int
    arriving: dict[str, list[Counts]]
    unseen: dict[str, list[Counts]]
    work: dict[str, Work]

    def gain(self, over: str = FROZEN) -> float:
        """How much more of what it tests online gets right in the end, on unseen records."""
        return total(self.unseen[ONLINE]).agreement - total(self.unseen[over]).agreement


def adapt(
    experiment: Experiment,
    stream: Stream,
    kind: str,
    recipe: Recipe,
    most: float,
    report: Callable[[str], None] = lambda step: None,
) -> Adapted:
    """Measure the three ways on a stream.

    Args:
        experiment: where drafters come from.
        stream: what arrives, and what is only measured on.
        kind: of the drafter.
        recipe: how online learns; the other two learn with the same settings for as long as they get better.
        most: passes of the other two.
        report: told what is done.
    """
    arriving: dict[str, list[Counts]] = {}
    unseen: dict[str, list[Counts]] = {}
    work: dict[str, Work] = {}
    drafter = experiment.fresh(kind)
    start, stream = copied(drafter), experiment.read_by(drafter, stream)
    offline = experiment.offline_acceptance(drafter, stream)
    for way, taught in ((FROZEN, first(stream, TENTH)), (OFFLINE, stream.arriving)):
        report(f"{stream.name}, {kind}: distilling {way} on {len(taught)} records")
        drafter.load_weights(start)
        work[way] = distill(drafter, taught, recipe, most)
        measured = offline.measure(drafter.weights(), [*stream.arriving, *stream.unseen])
        counts = [one.counts for one in measured]
        arriving[way], unseen[way] = counts[: len(stream.arriving)], counts[len(stream.arriving) :]
    drafter.load_weights(start)
    online = Online(drafter, recipe, offline)

    def tell(done: int) -> None:
        if done % 40 == 0:
            report(f"{stream.name}, {kind}: {done} of {len(stream.arriving)} records")

    arriving[ONLINE] = online.serve(stream.arriving, tell)
    unseen[ONLINE] = [one.counts for one in offline.measure(online.in_service, stream.unseen)]
    work[ONLINE] = online.work
    return Adapted(stream.name, kind, recipe.seed, arriving, unseen, work)
