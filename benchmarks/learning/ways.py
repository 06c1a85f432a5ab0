"""Three ways to train a drafter on a stream: frozen after a tenth of it, online, and offline on all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.learning.experiment import Experiment, RecordedStream
from benchmarks.learning.learner import OnlineService, Recipe, TrainingWork, copy_weights, distill
from benchmarks.learning.offline_acceptance import DraftCounts, TextDrafts
from osd.cli.report import say

FROZEN, ONLINE, OFFLINE = "frozen", "online", "offline"
WAYS = (FROZEN, ONLINE, OFFLINE)

TENTH = 0.1
"""Share of the stream to distil the frozen drafter on."""


@dataclass(frozen=True)
class TrainedDrafter:
    """Drafter after training in one of the ``WAYS``."""

    weights: dict[str, Tensor]  # final weights
    work: TrainingWork  # cost of the training
    arriving: list[DraftCounts]  # counts of each arriving record
    unseen: list[TextDrafts]  # drafts of the final weights along the unseen records
    spent: list[float]  # CPU seconds of training before each arriving record was drafted for


class StreamTraining:
    """Training of one kind of drafter on a stream in several ways, each time from the same weights."""

    def __init__(
        self, experiment: Experiment, stream: RecordedStream, kind: str, recipe: Recipe, max_passes: float
    ) -> None:
        """Create a drafter; frozen and offline train until there is no improvement, at most ``max_passes`` passes."""
        self.drafter = experiment.new_drafter(kind)
        self._start, self._stream = copy_weights(self.drafter), experiment.stream_for(self.drafter, stream)
        self._offline = experiment.offline_acceptance(self.drafter, stream)
        self._recipe, self._most, self._name = recipe, max_passes, f"{stream.name}, {kind}"

    def learn(self, way: str) -> TrainedDrafter:
        """Train in one of the ``WAYS``; the drafter keeps these weights until the next call."""
        self.drafter.load_weights(self._start)
        return self._online() if way == ONLINE else self._distilled(way)

    def _distilled(self, way: str) -> TrainedDrafter:
        stream, drafter = self._stream, self.drafter
        training_records = (
            stream.arriving[: max(round(TENTH * len(stream.arriving)), 1)] if way == FROZEN else stream.arriving
        )
        say(f"{self._name}: distilling {way} on {len(training_records)} records")
        work = distill(drafter, training_records, self._recipe, self._most)
        drafts = self._offline.measure(drafter.weights(), [*stream.arriving, *stream.unseen])
        split = len(stream.arriving)
        counts, spent = [draft.counts for draft in drafts[:split]], [work.cpu_seconds] * split
        return TrainedDrafter(copy_weights(drafter), work, counts, drafts[split:], spent)

    def _online(self) -> TrainedDrafter:
        online, stream, spent = OnlineService(self.drafter, self._recipe, self._offline), self._stream, list[float]()
        before = 0.0

        def report(done: int) -> None:
            nonlocal before
            spent.extend([before] * (done - len(spent)))
            before = online.work.cpu_seconds
            if done % 40 == 0:
                say(f"{self._name}: {done} of {len(stream.arriving)} records")

        counts = online.serve(stream.arriving, report)
        self.drafter.load_weights(online.in_service)
        unseen = self._offline.measure(online.in_service, stream.unseen)
        return TrainedDrafter(copy_weights(self.drafter), online.work, counts, unseen, spent)
