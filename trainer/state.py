"""State of one domain's training, the source of its status, reports, events and checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from osd.registry.training import FundReport, Training

if TYPE_CHECKING:
    from osd.learning.online import Learner

_SAVED = ("records", "trained", "held_out", "refused", "tokens", "published", "rejected", "drifts")
_REPORTED = (
    *("steps", "skipped", "records", "trained", "held_out", "refused", "rejected", "drifts", "lag", "lag_seconds"),
    *("loss", "state", "detail"),
)


class TrainingCost(msgspec.Struct, frozen=True):
    """Core seconds of training.

    Attributes:
        cpu: CPU seconds of the trainer.
        contended: the part of ``cpu`` that ran while requests ran.
        slowed: core seconds that replicas lost to training and to swaps of versions.
        unpublished: the part of all core seconds since the last version.
    """

    cpu: float = 0.0
    contended: float = msgspec.field(default=0.0, name="beside")
    slowed: float = 0.0
    unpublished: float = 0.0

    @property
    def total(self) -> float:
        """Sum of ``cpu`` and ``slowed``."""
        return self.cpu + self.slowed


@dataclass
class TrainerState:
    """State of a domain's trainer. After a restart from a checkpoint, counts include the earlier runs.

    Attributes:
        state: "waiting", "training", "yielding" (to requests), "paused" (by ``pause``) or "stopped".
        detail: the reason, in one line.
        records: records of this domain that were read from the stream.
        trained: records that training used at least once.
        held_out: records that are kept to evaluate candidates.
        refused: records that training cannot use.
        tokens: completion tokens that were trained on, repetitions included.
        steps: micro-steps.
        skipped: micro-steps and updates that were skipped, as the loss or a gradient was not finite or far too large.
        published: candidates that were published.
        rejected: candidates that the gate rejected.
        drifts: falls of the live acceptance rate.
        version: the stable version.
        loss: the loss of the last micro-step that was not skipped.
        gate: the last decision of the gate.
        drift: the last fall of the acceptance rate.
        canary: the last decision on a canary.
        lag: records that are not acknowledged.
        lag_seconds: the age of the oldest of these records.
    """

    state: str = "waiting"
    detail: str = "starting"
    records: int = 0
    trained: int = 0
    held_out: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    skipped: int = 0
    published: int = 0
    rejected: int = 0
    drifts: int = 0
    version: int = 0
    loss: float | None = None
    gate: dict[str, Any] = field(default_factory=dict)
    drift: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    lag: int | None = None
    lag_seconds: float | None = None

    def set(self, state: str, detail: str = "") -> None:
        """Set the state and its reason."""
        self.state, self.detail = state, detail

    def follow(self, learner: Learner) -> None:
        """Copy the learner's counters."""
        counters, distiller = learner.counters, learner.distiller
        self.records, self.trained, self.held_out = counters.records, counters.trained, counters.held_out
        self.tokens, self.steps, self.skipped = counters.tokens, distiller.steps, distiller.skipped

    def status(self) -> dict[str, Any]:
        """Return all fields as a dict."""
        return asdict(self)

    def checkpoint_state(self) -> dict[str, int]:
        """Return the counts for a checkpoint; ``steps`` and ``skipped`` are in the distiller's state."""
        return {name: getattr(self, name) for name in _SAVED}

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore the counts that ``checkpoint_state`` returned.

        Raises:
            ValueError, KeyError, TypeError: the state cannot be read; nothing changes.
        """
        for name, count in {name: int(saved[name]) for name in _SAVED}.items():
            setattr(self, name, count)

    def event(self, learner: Learner, cost: TrainingCost) -> dict[str, Any]:
        """Return the figures of a micro-step's event."""
        head = learner.distiller.head_loss
        return {
            "loss": self.loss,
            "step": self.steps,
            "tokens": self.tokens,
            "records": self.records,
            "lag": self.lag,
            "skipped": self.skipped,
            "cpu_seconds": round(cost.cpu, 3),
            **({} if head is None else {"head_loss": head}),
            **learner.trigger.figures(),
        }

    def report(self, learner: Learner, cost: TrainingCost, account: FundReport, states_wanted: float) -> Training:
        """Return the report for serving, including the records, tokens and bytes of the replay buffer.

        ``states_wanted`` is the share, from 0 to 1, of records whose hidden states training can use.
        """
        replay = learner.replay
        return Training(
            **{name: getattr(self, name) for name in _REPORTED},
            positions=self.tokens,
            passed=self.published,
            cpu_seconds=cost.cpu,
            beside_seconds=cost.contended,
            slowed_seconds=cost.slowed,
            replay_records=len(replay.record_keys()),
            replay_tokens=replay.tokens,
            replay_bytes=replay.bytes,
            account=account,
            states_wanted=states_wanted,
        )
