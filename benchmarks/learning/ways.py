"""A kind of drafter that learns one stream: frozen after a tenth of it, online, and distilled on all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.learning.experiment import Experiment, Stream
from benchmarks.learning.learner import Online, Recipe, Work, copied, distill
from benchmarks.learning.offline_acceptance import Counts, Drafted
from osd.cli.report import say

FROZEN, ONLINE, OFFLINE = "frozen", "online", "offline"
WAYS = (FROZEN, ONLINE, OFFLINE)

TENTH = 0.1
"""Share of the stream that the frozen drafter is distilled on."""


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

    def __init__(self, experiment: Experiment, stream: Stream, kind: str, recipe: Recipe, most: float) -> None:
        """Take a new drafter.

        Args:
            experiment: where drafters come from.
            stream: what arrives, and what is only measured on.
            kind: of the drafter.
            recipe: how online learns; the other two learn with the same settings for as long as they get better.
            most: passes of the other two.
        """
        self.drafter = experiment.fresh(kind)
        self._start, self._stream = copied(self.drafter), experiment.read_by(self.drafter, stream)
        self._offline = experiment.offline_acceptance(self.drafter, stream)
        self._recipe, self._most, self._name = recipe, most, f"{stream.name}, {kind}"

    def learn(self, way: str) -> TrainedDrafter:
        """Learn in one of the ``WAYS``; the drafter has what it learnt until it learns again."""
        self.drafter.load_weights(self._start)
        return self._online() if way == ONLINE else self._beforehand(way)

    def _beforehand(self, way: str) -> TrainedDrafter:
        stream, drafter = self._stream, self.drafter
        taught = stream.arriving[: max(round(TENTH * len(stream.arriving)), 1)] if way == FROZEN else stream.arriving
        say(f"{self._name}: distilling {way} on {len(taught)} records")
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
                say(f"{self._name}: {done} of {len(stream.arriving)} records")

        counts = online.serve(stream.arriving, tell)
        self.drafter.load_weights(online.in_service)
        unseen = self._offline.measure(online.in_service, stream.unseen)
        return TrainedDrafter(copied(self.drafter), online.work, counts, unseen, spent)
