"""Online learner: trains a drafter on traces and proposes candidates, without streams, clocks or other processes."""

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
from osd.learning.distiller import Distiller, DistillerError, MicroStep
from osd.learning.drift import Drift
from osd.learning.gate import MIN_POSITIONS, Gate, GateDecision
from osd.learning.replay import AddResult, Replay, ReplaySample
from osd.learning.trainer_recall import TrainerRecall

FIRST_SECONDS = 30.0
"""CPU seconds of training before the first candidate, and before the first one after drift."""

MIN_HELD_OUT_TOKENS = 2 * MIN_POSITIONS
"""Completion tokens to hold out before ``trainer.held_out`` applies; until then a larger share is held out."""

HELD_OUT_TOKENS = 4096
"""Newest held-out tokens that the gate evaluates: about twenty requests, which take a few seconds."""

EVALUATION_TOKENS = 128
"""Tokens of a micro-batch of the evaluation: few enough for short pauses, and the same for both drafters."""

PASSES = 8
"""Minimum number of passes over the completion of a new record, regardless of held-out figures."""

WORTHWHILE = 0.99
"""Ratio of held-out divergences below which a candidate counts as an improvement."""


class LocalExecutor:
    """Executor of micro-steps in this process, one micro-batch each.

    A subclass with a ``size`` above 1 uses that many processes, with one micro-batch each.
    """

    size = 1

    def step(self, distiller: Distiller, samples: list[ReplaySample]) -> MicroStep:
        """Run one micro-step on ``size`` samples, one for each process."""
        (sample,) = samples
        return distiller.step(collate(sample.traces, distiller.drafter.device))


class TrainingTrigger:
    """Decision whether to do a micro-step on the present records, from numbers only.

    An update starts after ``trainer.trigger_records`` new records, when a new record has waited for
    ``trainer.trigger_seconds``, or after drift. It continues until every record was trained on and the trained tokens
    are eight times the tokens of the new records. After that, it continues as long as each candidate improves the
    held-out divergence. It never ends before the first candidate of a drafter, which gives the first measure of
    improvement.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._improving = True
        self._budget = 0
        self._running = True
        self._waiting_since: float | None = None
        self._drifted = False
        self._best, self._held_out = math.inf, 0

    def on_resume(self) -> None:
        """Wait for new records: the drafter comes from a checkpoint, and it is unknown whether it still improves."""
        self._improving = self._running = False

    def on_records(self, tokens: int) -> None:
        """Count completion tokens of new records."""
        self._budget += PASSES * tokens

    def on_drift(self) -> None:
        """Start an update as soon as there is a record that was never trained on."""
        self._drifted = True

    def on_step(self, positions: int) -> None:
        """Count completion tokens that a micro-step trained on."""
        self._budget = max(self._budget - positions, 0)

    def on_decision(self, decision: GateDecision, held_out: int) -> None:
        """Update the state after a decision of the gate.

        Args:
            decision: the decision.
            held_out: number of records ever held out. Divergences compare only while it is constant.
        """
        if decision.candidate is None or decision.baseline is None:
            self._improving = False
            return
        if held_out != self._held_out:
            self._best, self._held_out = math.inf, held_out
        divergence = decision.candidate.divergence
        # A comparison with NaN ends the update.
        self._improving = divergence < WORTHWHILE * min(decision.baseline.divergence, self._best)
        self._best = min(self._best, divergence)

    def figures(self) -> dict[str, float]:
        """Return the progress of the update.

        ``budget`` is the number of completion tokens still to train on. ``best_divergence`` is the lowest divergence of
        a candidate on the current held-out records, absent before the first candidate.
        """
        return {"budget": self._budget} | ({} if math.isinf(self._best) else {"best_divergence": self._best})

    def due(self, fresh: int, now: float) -> bool:
        """Return whether to do a micro-step.

        Args:
            fresh: number of records that were never trained on.
            now: monotonic time in seconds.
        """
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
    """Counters of a learner since its first start, across checkpoints.

    Attributes:
        records: number of records added.
        trained: number of records trained on at least once.
        held_out: number of held-out records.
        tokens: number of completion tokens trained on, repeats included.
    """

    records: int = 0
    trained: int = 0
    held_out: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class LearnerStep:
    """Result of a learner's micro-step.

    Attributes:
        step: loss, and whether the step was skipped.
        positions: number of completion tokens trained on.
        fresh: keys of records that were trained on for the first time.
    """

    step: MicroStep
    positions: int
    fresh: list[Key]


class Learner:
    """Online distillation of one drafter from traces.

    The caller adds traces, does steps while ``trigger`` says so, and proposes a candidate when ``due``. The first step
    needs ``trainer.min_records`` records. Training continues with the same weights after a rejected candidate.

    Attributes:
        log_gain: logarithm of the gain in tokens per step in the gate's last decision; None before a decision and after
            drift.
        seconds: CPU seconds of micro-steps since the last drift.
        next_candidate: number of micro-steps after which the next candidate is due.
    """

    def __init__(
        self,
        distiller: Distiller,
        settings: TrainerSettings,
        gate: Gate,
        vocabulary: int,
        replay: Replay,
        recall: TrainerRecall | None = None,
    ) -> None:
        """Create a learner.

        Args:
            distiller: the distiller of the drafter.
            settings: the settings of training.
            gate: the gate for candidates.
            vocabulary: the number of the target's ids.
            replay: the replay buffer, which may contain records.
            recall: recall of the trainer if replicas draft with recall. The gate then weights positions by recall's
                misses.
        """
        self.distiller, self.replay, self.gate = distiller, replay, gate
        self.trigger = TrainingTrigger(settings)
        self.counters = Counters()
        self.log_gain: float | None = None
        self.seconds = 0.0
        self.next_candidate = settings.steps_per_candidate
        self._settings, self._vocabulary, self._recall = settings, vocabulary, recall

    def add(self, trace: Trace) -> AddResult:
        """Add a trace for training or evaluation; a known trace changes nothing."""
        added = self.replay.add(trace)
        if added.part != "duplicate":
            self.counters.records += 1
            self.counters.held_out += added.part == "held_out"
        if added.part == "train":
            self.trigger.on_records(trace.completion_ids.shape[0])
            if self._recall is not None:
                self._recall.learn(trace)
        return added

    def add_without_states(self, trace: Trace) -> None:
        """Let recall learn a trace without hidden states, which the drafter cannot train on."""
        if self._recall is not None and not self.replay.holds_out(trace):
            self._recall.learn(trace)

    @property
    def ready(self) -> bool:
        """Whether there are enough records for the first step."""
        return self.counters.records >= self._settings.min_records and self.replay.train_records > 0

    def step(self, tokens: int, executor: LocalExecutor) -> LearnerStep:
        """Run one micro-step; each process of the executor gets a micro-batch that costs at most ``tokens``."""
        if not self.distiller.steps:
            self.adapt_vocabulary()
        samples = [self.replay.sample(tokens) for _ in range(executor.size)]
        step = executor.step(self.distiller, samples)
        fresh = [key for sample in samples for key in sample.fresh]
        positions = sum(sample.positions for sample in samples)
        self.counters.trained += len(fresh)
        self.counters.tokens += positions
        self.trigger.on_step(positions)
        return LearnerStep(step, positions, fresh)

    def add_seconds(self, seconds: float) -> None:
        """Add CPU seconds of a micro-step; a candidate is due after the first 30, and after 30 since drift."""
        before = self.seconds
        self.seconds += seconds
        if before < FIRST_SECONDS <= self.seconds:
            self.next_candidate = min(self.next_candidate, self.distiller.steps)

    def on_drift(self, drift: Drift) -> None:
        """Start an update after drift, see ``TrainingTrigger``, and reset ``log_gain`` and ``seconds``.

        Held-out records from before the drift are dropped: a drafter that is better on current traffic may be worse on
        them.
        """
        self.trigger.on_drift()
        self.replay.retire(drift.since)
        self.log_gain, self.seconds = None, 0.0

    @property
    def due(self) -> bool:
        """Whether a candidate is due."""
        return self.distiller.steps >= self.next_candidate

    def candidate(self) -> Trainable:
        """Return the drafter in training, after applying gathered gradients and adapting its vocabulary."""
        self.distiller.update()
        self.adapt_vocabulary()
        return self.distiller.drafter

    def propose(self, baseline: Trainable) -> GateDecision:
        """Return the gate's decision on the candidate against ``baseline``."""
        decision = self.gate.judge(self.candidate(), baseline, self.held_out)
        self.on_decision(decision)
        return decision

    def on_decision(self, decision: GateDecision) -> None:
        """Update the state after a decision of the gate.

        The next candidate comes after a fifth of the usual steps if the gate waits for more held-out records.
        """
        every = self._settings.steps_per_candidate
        self.next_candidate = self.distiller.steps + (max(every // 5, 1) if decision.waits else every)
        self.trigger.on_decision(decision, self.counters.held_out)
        if (gain := decision.log_gain) is not None:
            self.log_gain = gain

    def adapt_vocabulary(self) -> None:
        """Adapt the draft vocabulary to the traffic so far, because early records contain few of its tokens."""
        self.distiller.adapt_vocabulary(torch.from_numpy(self.replay.token_counts(self._vocabulary)))

    def catch_up(self) -> bool:
        """Let recall learn some of its waiting records; return False when there are none."""
        return self._recall is not None and self._recall.catch_up()

    def held_out(self) -> Iterator[DistillBatch]:
        """Yield the newest held-out positions, in the same micro-batches for both drafters of a decision."""
        while self.catch_up():
            pass
        for batch in held_out_batches(self.replay):
            if self._recall is not None:
                batch.weight = self._recall.miss_probability(batch)
            yield batch.to(self.distiller.drafter.device)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and optimizer as tensors and all other state as JSON values, without traces."""
        tensors, counters = self.distiller.state_dict()
        return tensors, {
            "distiller": counters,
            "counters": asdict(self.counters),
            "next_gate": self.next_candidate,
            "random": self.replay.random_state(),
            "seconds": self.seconds,
            "promised": self.log_gain,
        }

    def resume(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the values of ``state``.

        Raises:
            DistillerError: the state does not fit this drafter.
            osd.drafting.base.DrafterError: the weights do not fit this drafter.
        """
        try:
            counters = Counters(**{name: int(state["counters"][name]) for name in asdict(self.counters)})
            next_candidate = int(state["next_gate"])
            self.distiller.load_state_dict(tensors, state["distiller"])
            self.replay.set_random_state(state["random"])
            seconds, gain = float(state.get("seconds", 0.0)), state.get("promised")
            gain = None if gain is None else float(gain)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DistillerError(f"the learner's state cannot be read: {error!r}") from None
        self.counters, self.seconds, self.log_gain = counters, seconds, gain
        # A smaller steps_per_candidate than before the restart applies immediately.
        self.next_candidate = min(next_candidate, self.distiller.steps + self._settings.steps_per_candidate)
        self.trigger.on_resume()


def empty_replay(settings: TrainerSettings, seed: int = 0, min_held_out: int = MIN_HELD_OUT_TOKENS) -> Replay:
    """Return an empty replay buffer with the limits of the settings.

    Args:
        settings: the settings of training.
        seed: the seed of the random draws.
        min_held_out: completion tokens to hold out before ``trainer.held_out`` applies.
    """
    max_bytes = settings.replay_mb << 20
    return Replay(settings.replay_tokens, settings.held_out, seed, settings.anchors, min_held_out, max_bytes)


def held_out_batches(replay: Replay) -> Iterator[DistillBatch]:
    """Yield the newest held-out positions of a buffer in micro-batches."""
    traces = replay.held_out(HELD_OUT_TOKENS)
    max_weight = max((trace.weight for trace in traces), default=1.0)
    for group in pack(traces, EVALUATION_TOKENS):
        batch = collate(group)
        batch.max_trace_weight = max_weight
        yield batch
