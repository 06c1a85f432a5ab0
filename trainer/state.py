"""State of one domain's training, from which its status, its report, its events and its checkpoint are derived."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from osd.registry.training import Account, Training

if TYPE_CHECKING:
    from osd.learning.online import Learner

_SAVED = ("records", "trained", "held_out", "refused", "tokens", "published", "rejected", "drifts")
_REPORTED = (
    "steps", "skipped", "records", "trained", "held_out", "refused", "rejected", "drifts", "lag", "lag_seconds", "loss"
)  # fmt: skip


class Spent(msgspec.Struct, frozen=True):
    """Core seconds of training.

    Attributes:
        cpu: CPU seconds of the trainer.
        beside: of these, while requests ran.
        slowed: that replicas lost by training and by taking up versions.
        unpublished: of all of them, since the last version.
    """

    cpu: float = 0.0
    beside: float = 0.0
    slowed: float = 0.0
    unpublished: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.cpu + self.slowed


@dataclass
class TrainerState:
    """What the trainer of a domain does and has done. Counts are since the first start, checkpoints included.

    Attributes:
        state: "waiting", "training", "yielding", "paused" or "stopped".
        detail: why, in one line.
        records: taken from the stream for this domain.
        trained: of these, trained on at least once.
        held_out: of these, kept to judge candidates.
        refused: records that cannot be trained on.
        tokens: completion tokens trained on, repeats included.
        steps: micro-steps.
        skipped: micro-steps and updates whose loss or gradient was not finite or far too large.
        published: candidates that became a version.
        rejected: candidates that did not.
        drifts: falls of live acceptance below its own level.
        version: in service.
        loss: of the last micro-step that taught something.
        gate: the last decision of the gate.
        drift: the last fall.
        canary: the last decision on a canary.
        lag: records that are not acknowledged.
        lag_seconds: age of the oldest of these.
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

    def say(self, state: str, detail: str = "") -> None:
        """Set what the trainer does now, and why."""
        self.state, self.detail = state, detail

    def follow(self, learner: Learner) -> None:
        """Take over what the learner counts."""
        counters, distiller = learner.counters, learner.distiller
        self.records, self.trained, self.held_out = counters.records, counters.trained, counters.held_out
        self.tokens, self.steps, self.skipped = counters.tokens, distiller.steps, distiller.skipped

    def status(self) -> dict[str, Any]:
        """Return all of it, for whoever asks the trainer."""
        return asdict(self)

    def saved(self) -> dict[str, int]:
        """Return the counts that a checkpoint keeps; it keeps ``steps`` and ``skipped`` with the distiller's state."""
        return {name: getattr(self, name) for name in _SAVED}

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what ``saved`` returned.

        Raises:
            ValueError, KeyError, TypeError: it cannot be read; nothing changes.
        """
        for name, count in {name: int(saved[name]) for name in _SAVED}.items():
            setattr(self, name, count)

    def event(self, learner: Learner, spent: Spent) -> dict[str, Any]:
        """Return the figures of the event of a micro-step."""
        head = learner.distiller.head_loss
        return {
            "loss": self.loss,
            "step": self.steps,
            "tokens": self.tokens,
            "records": self.records,
            "lag": self.lag,
            "skipped": self.skipped,
            "cpu_seconds": round(spent.cpu, 3),
            **({} if head is None else {"head_loss": head}),
            **learner.trigger.figures(),
        }

    def report(self, learner: Learner, spent: Spent, account: Account, wanted: float) -> Training:
        """Return the report that serving shows: also the replay buffer, and states of records ``wanted``."""
        replay = learner.replay
        return Training(
            **{name: getattr(self, name) for name in _REPORTED},
            positions=self.tokens,
            passed=self.published,
            cpu_seconds=spent.cpu,
            beside_seconds=spent.beside,
            slowed_seconds=spent.slowed,
            replay_records=len(replay.known()),
            replay_tokens=replay.tokens,
            replay_bytes=replay.bytes,
            account=account,
            states_wanted=wanted,
        )
