"""What a trainer leaves to its successor: the checkpoint, and when it was written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from osd.config import Settings
from osd.drafters.acceptance_head import without_head
from osd.drafters.trainable import Trainable
from osd.learning.distiller import Distiller
from osd.learning.replay import Replay
from osd.registry.ledger import Spent
from osd.registry.versions import Version
from trainer import checkpoint
from trainer.learnt import Learnt
from trainer.spending import Spending
from trainer.status import Status

logger = logging.getLogger(__name__)

_SAVED = ("records", "trained", "held_out", "refused", "tokens", "published", "rejected", "drifts")


class Progress:
    """Saves the drafter in training with its optimizer, counters, cost and random numbers, and takes them up again.

    The replay buffer itself is not kept: it fills again from the traffic, and no record of a request is in the file.

    Attributes:
        next_gate: the step of the next candidate.
    """

    def __init__(
        self, settings: Settings, status: Status, replay: Replay, spending: Spending, learnt: Learnt,
        distiller: Callable[[Trainable], Distiller],
    ) -> None:  # fmt: skip
        self._path = settings.home_dir / "trainer" / f"{settings.domain}.safetensors"
        self._settings = settings
        self._status = status
        self._replay = replay
        self._spending = spending
        self._learnt = learnt
        self._distiller = distiller
        self._saved_at = time.monotonic()
        self._saved_steps = 0
        self.next_gate = settings.trainer.steps_per_candidate

    def age(self, distiller: Distiller, finished: int) -> float:
        """Seconds for which something has been unsaved, 0 when there is nothing to save.

        Args:
            distiller: what is in training.
            finished: records that wait for their acknowledgement.
        """
        return time.monotonic() - self._saved_at if finished or distiller.steps != self._saved_steps else 0.0

    def resume(self, version: Version, drafter: Trainable) -> Distiller | None:
        """Go on from the checkpoint; None when there is none, or none that can be used.

        Args:
            version: in service; the checkpoint must be of its kind and size.
            drafter: made of it.
        """
        try:
            found = checkpoint.load(self._path)
            if found is None:
                return None
            tensors, state = found
            same = without_head(state.get("config") or {}) == without_head(version.config)
            if not same or state.get("target") != self._settings.target.source:
                raise checkpoint.CheckpointError(f"{self._path.name} is of another drafter or target")
            distiller = self._distiller(drafter)
            distiller.load_state_dict(tensors, state["distiller"])
            counters = {name: int(state["counters"].get(name, 0)) for name in _SAVED}
            next_gate = int(state["next_gate"])
            learnt = list(state.get("learnt", []))
            spent = msgspec.convert(state.get("spent", {}), Spent, strict=False)
            self._replay.set_random_state(state["random"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("training starts from version %d, not from the checkpoint: %s", version.number, error)
            return None
        self._spending.resume(spent)
        self._learnt.resume(learnt)
        for name, value in counters.items():
            setattr(self._status, name, value)
        # A smaller steps_per_candidate than last time counts at once.
        self.next_gate = min(next_gate, distiller.steps + self._settings.trainer.steps_per_candidate)
        self._saved_steps = distiller.steps
        logger.info("training goes on from the checkpoint at step %d", distiller.steps)
        return distiller

    def save(self, distiller: Distiller) -> bool:
        """Write the checkpoint; False when the disk does not take it."""
        self._saved_at = time.monotonic()
        tensors, counters = distiller.state_dict()
        state = {
            "config": distiller.drafter.config(),
            "target": self._settings.target.source,
            "distiller": counters,
            "counters": {name: getattr(self._status, name) for name in _SAVED},
            "next_gate": self.next_gate,
            "spent": msgspec.to_builtins(self._spending.spent(), str_keys=True),
            "learnt": self._learnt.state(),
            "random": self._replay.random_state(),
        }
        try:
            checkpoint.save(self._path, tensors, state)
        except OSError as error:
            logger.error("the checkpoint cannot be written: %s", error)
            return False
        self._saved_steps = distiller.steps
        return True
