"""The trainer's own state on disk: one safetensors file, with everything that is not a tensor as JSON in its header."""

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
"""Format number of a checkpoint; ``load`` refuses every other one."""

_IDLE_SECONDS = 600.0
"""Between two checkpoints while nothing is trained."""


class CheckpointError(ValueError):
    """A checkpoint is there and cannot be read; one line."""


def save(
    path: Path, tensors: dict[str, Tensor], state: dict[str, Any], guard: AbstractContextManager[None] | None = None
) -> None:
    """Replace the checkpoint, holding ``guard`` then; a crash at any moment leaves the old one or the new one.

    Raises:
        OSError: the disk does not take it.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    files.replace(path, safetensors.torch.save(tensors, {_FORMAT: FORMAT, _STATE: json.dumps(state)}), guard=guard)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read what ``save`` wrote, None when there is no checkpoint yet.

    Raises:
        CheckpointError: the file is damaged or has another format number.
    """
    files.clear(path)
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found, state = metadata.get(_FORMAT, "none"), json.loads(metadata[_STATE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found} and this build reads format {FORMAT}: the next one replaces it"
        )
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.name} cannot be read: its state is no object")
    return tensors, state


class Checkpoints:
    """Saves the learner of a domain with what its trainer counts, and takes them up again.

    The replay buffer itself is not kept: it fills again from the traffic, and no record of a request is in the file.
    """

    def __init__(self, settings: Settings, target: Identity, reporter: TrainingReporter, lease: Lease) -> None:
        """Keep those of ``settings.domain`` for this target."""
        self._path = settings.home_dir / "trainer" / f"{settings.domain}.safetensors"
        self._target, self._reporter, self._lease = target, reporter, lease
        self._saved_at = self._written_at = time.monotonic()
        self._saved_steps = 0
        self._refused = False

    def resume(self, learner: Learner, version: Version) -> bool:
        """Go on from the checkpoint; False when there is none, or none of the kind and size of ``version``, in service.

        ``learner`` is of a drafter made of that version; after a failure it is not to be used.
        """
        try:
            found = load(self._path)
            if found is None:
                return False
            tensors, state = found
            same = without_head(state.get("config") or {}) == without_head(version.config)
            if not same or not self._target.wrote(state.get("target", "")):
                raise CheckpointError(f"{self._path.name} is of another drafter or target")
            learner.resume(tensors, state)
            self._reporter.resume(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("training starts from version %d, not from the checkpoint: %s", version.number, error)
            return False
        self._saved_steps = learner.distiller.steps
        logger.info("training goes on from the checkpoint at step %d", self._saved_steps)
        return True

    def keep(self, learner: Learner, finished: int, after: float) -> bool:
        """See that no training, nor ``finished`` records, wait for longer than ``after`` seconds for a checkpoint.

        Says whether what is finished may be acknowledged. While nothing is trained that needs no checkpoint, and one is
        written now and then alone.
        """
        now, trained = time.monotonic(), learner.distiller.steps != self._saved_steps
        if now - self._saved_at <= after or not (finished or trained):
            return False
        if trained or now - self._written_at >= _IDLE_SECONDS:
            return self.save(learner)
        self._saved_at = now
        return True

    def save(self, learner: Learner) -> bool:
        """Write the checkpoint; False when the disk does not take it, which is logged once.

        Raises:
            osd.registry.pointer.FencedError: another trainer has taken over the domain.
        """
        self._saved_at = time.monotonic()
        tensors, state = learner.state()
        state |= {
            **self._reporter.saved(learner),
            "config": learner.distiller.drafter.config(),
            "target": self._target.label,
        }
        try:
            save(self._path, tensors, state, self._lease.held())
        except OSError as error:
            if not self._refused:
                logger.error("the checkpoint cannot be written, the one before stays: %s", error)
            self._refused = True
            return False
        self._refused = False
        self._written_at = time.monotonic()
        self._saved_steps = learner.distiller.steps
        return True
