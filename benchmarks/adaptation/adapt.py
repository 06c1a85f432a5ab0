"""How fast a drafter follows a stream: frozen after a tenth of it, learning online, and distilled on all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.adaptation.experiment import Experiment, Stream, first
from benchmarks.adaptation.learner import Online, Recipe, Work, copied, distill
from benchmarks.adaptation.offline_acceptance import Counts, Drafted, total

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


@dataclass(frozen=True)
class TrainedDrafter:
    """What a drafter learnt in one of the ``WAYS``.

    ``arriving`` are the counts of each record, ``unseen`` what it drafts along those that nobody trained on, with its
    ``weights`` as they are in the end. ``spent`` [record] are the CPU seconds of training when a record was drafted
    for; nothing was trained meanwhile but online.
    """

    weights: dict[str, Tensor]
    work: Work
    arriving: list[Counts]
    unseen: list[Drafted]
    spent: list[float]


class StreamTraining:
    """A kind of drafter that learns one stream in several ways, each time from the same weights."""

    def __init__(
        self,
        experiment: Experiment,
        stream: Stream,
        kind: str,
        recipe: Recipe,
        most: float,
        report: Callable[[str], None] = lambda step: None,
    ) -> None:
        """Take a new drafter.

        Args:
            experiment: where drafters come from.
            stream: what arrives, and what is only measured on.
            kind: of the drafter.
            recipe: how online learns; the other two learn with the same settings for as long as they get better.
            most: passes of the other two.
            report: told what is done.
        """
        self.drafter = experiment.fresh(kind)
        self._start, self._stream = copied(self.drafter), experiment.read_by(self.drafter, stream)
        self._offline = experiment.offline_acceptance(self.drafter, stream)
        self._recipe, self._most, self._report, self._name = recipe, most, report, f"{stream.name}, {kind}"

    def learn(self, way: str) -> TrainedDrafter:
        """Learn in one of the ``WAYS``; the drafter has what it learnt until it learns again."""
        self.drafter.load_weights(self._start)
        return self._online() if way == ONLINE else self._beforehand(way)

    def _beforehand(self, way: str) -> TrainedDrafter:
        stream, drafter = self._stream, self.drafter
        taught = first(stream, TENTH) if way == FROZEN else stream.arriving
        self._report(f"{self._name}: distilling {way} on {len(taught)} records")
        work = distill(drafter, taught, self._recipe, self._most)
        found = self._offline.measure(drafter.weights(), [*stream.arriving, *stream.unseen])
        arrived = len(stream.arriving)
        counts, spent = [one.counts for one in found[:arrived]], [work.cpu_seconds] * arrived
        return TrainedDrafter(copied(drafter), work, counts, found[arrived:], spent)

    def _online(self) -> TrainedDrafter:
        online, stream, spent = Online(self.drafter, self._recipe, self._offline), self._stream, list[float]()
        before = 0.0

        def tell(done: int) -> None:
            nonlocal before
            spent.extend([before] * (done - len(spent)))
            before = online.work.cpu_seconds
            if done % 40 == 0:
                self._report(f"{self._name}: {done} of {len(stream.arriving)} records")

        counts = online.serve(stream.arriving, tell)
        self.drafter.load_weights(online.in_service)
        unseen = self._offline.measure(online.in_service, stream.unseen)
        return TrainedDrafter(copied(self.drafter), online.work, counts, unseen, spent)


def adapt(
    experiment: Experiment,
    stream: Stream,
    kind: str,
    recipe: Recipe,
    most: float,
    report: Callable[[str], None] = lambda step: None,
) -> Adapted:
    """Measure the three ways on a stream; the arguments are those of ``StreamTraining``."""
    training = StreamTraining(experiment, stream, kind, recipe, most, report)
    found = {way: training.learn(way) for way in WAYS}
    arriving = {way: one.arriving for way, one in found.items()}
    unseen = {way: [drafted.counts for drafted in one.unseen] for way, one in found.items()}
    return Adapted(stream.name, kind, recipe.seed, arriving, unseen, {way: one.work for way, one in found.items()})
