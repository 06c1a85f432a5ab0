"""Checkpoint of the trainer: one safetensors file, with the values that are not tensors as JSON in its header."""

from __future__ import annotations

import json
import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from osd import files
from osd.config import Settings
from osd.drafting.acceptance_head import without_head
from osd.learning.online import Learner
from osd.registry.lease import Lease
from osd.registry.versions import Version
from osd.target.identity import Identity
from trainer.reporter import TrainingReporter

logger = logging.getLogger(__name__)

_STATE, _FORMAT = "state", "format"

FORMAT = "1"
"""Format number of a checkpoint; ``load`` refuses all others."""

_IDLE_SECONDS = 600.0
"""Time between two checkpoints while nothing is trained."""


class CheckpointError(ValueError):
    """Error of a checkpoint that exists but cannot be read; the message is one line."""


def save(
    path: Path, tensors: dict[str, Tensor], state: dict[str, Any], guard: AbstractContextManager[None] | None = None
) -> None:
    """Replace the checkpoint atomically, with ``guard`` held: after a crash, either the old or the new file is there.

    Raises:
        OSError: the disk cannot be written.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    files.replace(path, safetensors.torch.save(tensors, {_FORMAT: FORMAT, _STATE: json.dumps(state)}), guard=guard)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and state of a checkpoint; None when there is no checkpoint.

    Raises:
        CheckpointError: the file is damaged or has another format number.
    """
    files.clear(path)
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            number, state = metadata.get(_FORMAT, "none"), json.loads(metadata[_STATE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, but this osd reads format {FORMAT}: the next checkpoint replaces it"
        )
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name} cannot be read: its state is not a JSON object")
    return tensors, state


class Checkpoints:
    """Checkpoints of a domain: the learner, and the counts of its trainer.

    The replay buffer is not saved, so the file contains no record of a request; traffic fills the buffer again.
    """

    def __init__(self, settings: Settings, target: Identity, reporter: TrainingReporter, lease: Lease) -> None:
        """Create the checkpoints of ``settings.domain`` for a target."""
        self._path = settings.home_dir / "trainer" / f"{settings.domain}.safetensors"
        self._target, self._reporter, self._lease = target, reporter, lease
        self._saved_at = self._written_at = time.monotonic()
        self._saved_steps = 0
        self._refused = False

    def resume(self, learner: Learner, version: Version) -> bool:
        """Load the checkpoint into a learner with the drafter of the stable version.

        Returns:
            False when no checkpoint matches the target and the drafter's kind and size; then the learner must not be
            used.
        """
        try:
            checkpoint = load(self._path)
            if checkpoint is None:
                return False
            tensors, state = checkpoint
            is_same_kind = without_head(state.get("config") or {}) == without_head(version.config)
            if not is_same_kind or not self._target.wrote(state.get("target", "")):
                raise CheckpointError(f"{self._path.name} belongs to another drafter or target")
            learner.resume(tensors, state)
            self._reporter.resume(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("training starts from version %d instead of the checkpoint: %s", version.number, error)
            return False
        self._saved_steps = learner.distiller.steps
        logger.info("training continues from the checkpoint at step %d", self._saved_steps)
        return True

    def save_if_due(self, learner: Learner, finished: int, max_wait: float) -> bool:
        """Save a checkpoint when training or ``finished`` records have waited longer than ``max_wait`` seconds for one.

        While nothing is trained, finished records need no new checkpoint, and one is written only every ten minutes.

        Returns:
            Whether finished records may be acknowledged.
        """
        now, trained = time.monotonic(), learner.distiller.steps != self._saved_steps
        if now - self._saved_at <= max_wait or not (finished or trained):
            return False
        if trained or now - self._written_at >= _IDLE_SECONDS:
            return self.save(learner)
        self._saved_at = now
        return True

    def save(self, learner: Learner) -> bool:
        """Write the checkpoint; return False when the disk cannot be written, which is logged once.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        self._saved_at = time.monotonic()
        tensors, state = learner.state()
        state |= {
            **self._reporter.checkpoint_state(learner),
            "config": learner.distiller.drafter.config(),
            "target": self._target.label,
        }
        try:
            save(self._path, tensors, state, self._lease.held())
        except OSError as error:
            if not self._refused:
                logger.error("the checkpoint cannot be written, the previous checkpoint is kept: %s", error)
            self._refused = True
            return False
        self._refused = False
        self._written_at = time.monotonic()
        self._saved_steps = learner.distiller.steps
        return True
