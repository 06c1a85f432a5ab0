"""The learner: traces in, micro-steps, candidates out. It knows no stream, no clock, no process but its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch, collate, pack
from osd.learning.buffers import Key
from osd.learning.distiller import Distiller, DistillerError, Step
from osd.learning.drift import Drift
from osd.learning.gate import MIN_POSITIONS, Gate, GateDecision
from osd.learning.recalled import Recalled
from osd.learning.replay import Added, Replay, Sample

FIRST_SECONDS = 30.0
"""CPU seconds of learning before the first candidate, and before the first one after a fall of acceptance."""

ENOUGH_TOKENS = 2 * MIN_POSITIONS
"""Completion tokens until which more is held out than ``trainer.held_out`` says."""

HELD_OUT_TOKENS = 4096
"""Newest held-out tokens that the gate looks at: some twenty requests, judged in a few seconds."""

EVALUATION_TOKENS = 128
"""Micro-batch of the evaluation: short enough to yield, and always the same, so that both sides see the same."""

PASSES = 8
"""How often the completion of a new record is trained on whatever the held-out figures say."""

WORTHWHILE = 0.99
"""A candidate improved when its held-out divergence is below so much of the one before: less does not pay."""


class Local:
    """Computes micro-steps in this process, a micro-batch each.

    Several processes compute together where a subclass has a ``size`` above 1, a micro-batch each.
    """

    size = 1

    def step(self, distiller: Distiller, samples: list[Sample]) -> Step:
        """Do one micro-step on ``size`` samples."""
        (sample,) = samples
        return distiller.step(collate(sample.traces, distiller.drafter.device))


class TrainingTrigger:
    """Decides, from numbers alone, whether the records at hand are worth a micro-step.

    An update starts when ``trainer.trigger_records`` new records have come, when one of them has waited for
    ``trainer.trigger_seconds``, or when drift was found. It goes on until every record was trained on at least once
    and for its eight passes, and then for as long as each candidate improves the held-out divergence. The first
    candidate of a drafter is waited for in any case: nothing else can tell what further passes are worth.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._improving = True
        self._budget = 0
        self._running = True
        self._waiting_since: float | None = None
        self._drifted = False
        self._best, self._held_out = math.inf, 0

    def resumed(self) -> None:
        """The drafter comes from a checkpoint: whether it still improves is not known, and new records decide."""
        self._improving = self._running = False

    def arrived(self, tokens: int) -> None:
        """``tokens`` completion tokens came that were never trained on."""
        self._budget += PASSES * tokens

    def drifted(self) -> None:
        """Acceptance fell: what is new is to be learned at once."""
        self._drifted = True

    def worked(self, positions: int) -> None:
        """A micro-step trained on so many completion tokens."""
        self._budget = max(self._budget - positions, 0)

    def judged(self, decision: GateDecision, held_out: int) -> None:
        """The gate looked at a candidate; figures compare only while the number of records ever ``held_out`` stays."""
        if decision.candidate is None or decision.baseline is None:
            self._improving = False
            return
        if held_out != self._held_out:
            self._best, self._held_out = math.inf, held_out
        divergence = decision.candidate.divergence
        # Written so that a comparison with NaN ends the update.
        self._improving = divergence < WORTHWHILE * min(decision.baseline.divergence, self._best)
        self._best = min(self._best, divergence)

    def figures(self) -> dict[str, float]:
        """How far along the update is: completion tokens still to be trained on, and the best divergence so far."""
        return {"budget": self._budget} | ({} if math.isinf(self._best) else {"best_divergence": self._best})

    def due(self, fresh: int, now: float) -> bool:
        """Whether a micro-step is worth it, with ``fresh`` records never trained on; ``now`` in monotonic seconds."""
        if not fresh:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self._running:
            self._running = bool(fresh or self._budget or self._improving)
        elif self._waiting_since is not None:
            waited = now - self._waiting_since
            settings = self._settings
            self._running = self._drifted or fresh >= settings.trigger_records or waited >= settings.trigger_seconds
        if self._running and fresh:
            self._drifted = False
        return self._running


@dataclass
class Counters:
    """What a learner has done since its first start, checkpoints included.

    ``records`` came and ``trained`` of them were trained on at least once, ``held_out`` only evaluated; ``tokens`` are
    completion tokens trained on, repeats included.
    """

    records: int = 0
    trained: int = 0
    held_out: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Learned:
    """What a micro-step did: its loss, whether it taught nothing, and the records that it was the first to train on."""

    step: Step
    positions: int
    fresh: list[Key]


class Learner:
    """Distils one drafter from traces as they come.

    Whoever runs it adds traces, steps while ``trigger`` finds that worth it, and proposes when a candidate is due,
    after micro-step ``next_candidate``. Records of at least ``trainer.min_records`` requests come before the first
    step. A rejected candidate is trained on from where it is.
    """

    def __init__(
        self,
        distiller: Distiller,
        settings: TrainerSettings,
        gate: Gate,
        vocabulary: int,
        replay: Replay,
        recalled: Recalled | None = None,
    ) -> None:
        """Start with what ``replay`` holds; ``vocabulary`` is the number of the target's ids.

        Where recall drafts beside the drafter, ``recalled`` learns the same records: the gate then judges by what a
        drafter adds to it.
        """
        self.distiller, self.replay, self.gate = distiller, replay, gate
        self.trigger = TrainingTrigger(settings)
        self.counters = Counters()
        self.promised: float | None = None
        """Logarithm of the gain in tokens per step that the last gate saw; None where no gate has looked."""
        self.seconds = 0.0
        """CPU seconds of micro-steps, since the last fall of acceptance."""
        self.next_candidate = settings.steps_per_candidate
        self._settings, self._vocabulary, self._recalled = settings, vocabulary, recalled

    def add(self, trace: Trace) -> Added:
        """Keep a trace, to train on or to judge by; one that is there already changes nothing."""
        added = self.replay.add(trace)
        if added.part != "duplicate":
            self.counters.records += 1
            self.counters.held_out += added.part == "held_out"
        if added.part == "train":
            self.trigger.arrived(trace.completion_ids.shape[0])
            if self._recalled is not None:
                self._recalled.learn(trace)
        return added

    def overheard(self, trace: Trace) -> None:
        """Take note of a trace that has no hidden states to train on: recall knows it all the same."""
        if self._recalled is not None and not self.replay.holds_out(trace):
            self._recalled.learn(trace)

    @property
    def ready(self) -> bool:
        """Whether enough has come to begin with."""
        return self.counters.records >= self._settings.min_records and self.replay.train_records > 0

    def step(self, tokens: int, executor: Local) -> Learned:
        """Do one micro-step; each of those who compute has a micro-batch that costs at most ``tokens``."""
        if not self.distiller.steps:
            self.adapt_vocabulary()
        samples = [self.replay.sample(tokens) for _ in range(executor.size)]
        step = executor.step(self.distiller, samples)
        fresh = [key for sample in samples for key in sample.fresh]
        positions = sum(sample.positions for sample in samples)
        self.counters.trained += len(fresh)
        self.counters.tokens += positions
        self.trigger.worked(positions)
        return Learned(step, positions, fresh)

    def worked(self, seconds: float) -> None:
        """The last micro-step took so many CPU seconds; after the first 30, and after 30 since a fall, one is due."""
        begun = self.seconds
        self.seconds += seconds
        if begun < FIRST_SECONDS <= self.seconds:
            self.next_candidate = min(self.next_candidate, self.distiller.steps)

    def drifted(self, drift: Drift) -> None:
        """Acceptance fell: what is new is to be learned at once, and what it brings is not known.

        Records from before the fall judge no more: a drafter that is better for what is asked now may be worse there.
        """
        self.trigger.drifted()
        self.replay.retire(drift.since)
        self.promised, self.seconds = None, 0.0

    @property
    def due(self) -> bool:
        """Whether it is time for a candidate."""
        return self.distiller.steps >= self.next_candidate

    def candidate(self) -> Trainable:
        """The drafter in training, with all gathered gradients applied and its vocabulary adapted to the traffic."""
        self.distiller.update()
        self.adapt_vocabulary()
        return self.distiller.drafter

    def propose(self, baseline: Trainable) -> GateDecision:
        """Let the gate compare the candidate with ``baseline``."""
        decision = self.gate.judge(self.candidate(), baseline, self.held_out)
        self.judged(decision)
        return decision

    def judged(self, decision: GateDecision) -> None:
        """Take note of a decision; the next candidate comes after a fifth of the steps where the gate had to wait."""
        every = self._settings.steps_per_candidate
        self.next_candidate = self.distiller.steps + (max(every // 5, 1) if decision.waits else every)
        self.trigger.judged(decision, self.counters.held_out)
        if (gain := decision.log_gain) is not None:
            self.promised = gain

    def adapt_vocabulary(self) -> None:
        """Adapt the draft vocabulary to the traffic so far: the first records show few of its tokens."""
        self.distiller.adapt_vocabulary(torch.from_numpy(self.replay.token_counts(self._vocabulary)))

    def catch_up(self) -> bool:
        """Have recall learn some of the records that it has not; False when it knows them all."""
        return self._recalled is not None and self._recalled.catch_up()

    def held_out(self) -> Iterator[DistillBatch]:
        """What the gate looks at: the newest held-out positions, in the same micro-batches for both sides."""
        while self.catch_up():
            pass
        for batch in held_out(self.replay):
            if self._recalled is not None:
                batch.weight = self._recalled.leaves(batch)
            yield batch.to(self.distiller.drafter.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and optimizer as tensors, all else as JSON, for ``resume``; traces are not in it."""
        tensors, counters = self.distiller.state_dict()
        return tensors, {
            "distiller": counters,
            "counters": asdict(self.counters),
            "next_gate": self.next_candidate,
            "random": self.replay.random_state(),
            "seconds": self.seconds,
            "promised": self.promised,
        }

    def resume(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave.

        Raises:
            DistillerError: it is not of this drafter.
            osd.drafting.base.DrafterError: the weights are not this drafter's.
        """
        try:
            counters = Counters(**{name: int(state["counters"][name]) for name in asdict(self.counters)})
            next_candidate = int(state["next_gate"])
            self.distiller.load_state_dict(tensors, state["distiller"])
            self.replay.set_random_state(state["random"])
            seconds, promised = float(state.get("seconds", 0.0)), state.get("promised")
            promised = None if promised is None else float(promised)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DistillerError(f"the learner's state cannot be read: {error!r}") from None
        self.counters, self.seconds, self.promised = counters, seconds, promised
        # A smaller steps_per_candidate than last time counts at once.
        self.next_candidate = min(next_candidate, self.distiller.steps + self._settings.steps_per_candidate)
        self.trigger.resumed()


def empty_replay(settings: TrainerSettings, seed: int = 0, enough: int = ENOUGH_TOKENS) -> Replay:
    """A buffer as large as the settings say; more than their share is held out until ``enough`` tokens are."""
    most_bytes = settings.replay_mb << 20
    return Replay(settings.replay_tokens, settings.held_out, seed, settings.anchors, enough, most_bytes)


def held_out(replay: Replay) -> Iterator[DistillBatch]:
    """The newest held-out positions of a buffer, in micro-batches."""
    traces = replay.held_out(HELD_OUT_TOKENS)
    heaviest = max((trace.weight for trace in traces), default=1.0)
    for group in pack(traces, EVALUATION_TOKENS):
        batch = collate(group)
        batch.heaviest = heaviest
        yield batch
