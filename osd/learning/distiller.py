"""Distillation of a drafter from the target distributions that verification has computed."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osd.config import TrainerSettings
from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch
from osd.learning.head_training import HeadTraining
from osd.learning.objective import DistillationObjective
from osd.learning.optimizer import (
    CLIP,
    OptimizerStateError,
    apply_gradients,
    optimizer_state,
    products,
    read_optimizer_state,
    restore,
)

_SPIKE = 20.0
"""Ratio of a gradient norm to the median of recent norms above which the gradient is skipped."""

_RATE = 0.05
"""Weight of a micro-step in the running mean of the acceptance at each depth."""

_MAX_NORMS, _MIN_NORMS = 64, 16  # of the median: kept, and needed

_WEIGHT, _MOMENT = "drafter.", "optimizer."


Counts = tuple[int, float, int]
"""Content of gathered gradients: weighted positions; weight and number of the acceptance head's labels."""


class DistillerError(ValueError):
    """Saved state that does not fit the drafter."""


@dataclass(frozen=True)
class MicroStep:
    """Result of a micro-step.

    Attributes:
        loss: the loss, 0 if no position counts.
        skipped: whether the step had no effect on the weights.
    """

    loss: float
    skipped: bool


class Distiller:
    """Trainer of a drafter in micro-steps, each with one forward and one backward over a micro-batch.

    The drafter computes the loss; see ``osd.learning.objective``.

    Gradients are gathered over micro-steps until they cover ``trainer.update_tokens`` weighted positions, and are then
    applied by AdamW. So the duration of a micro-step does not limit the number of positions of an update.

    A micro-step is skipped if its loss is not finite. An update is skipped if its gradient norm is not finite, or above
    both 0.5 and 20 times the median of the last 64 norms. Skipped steps and updates change no weight. The median
    includes the finite norms of skipped updates, so a lasting change of scale is accepted after 32 norms. A micro-step
    without positions that count is left out and not counted as skipped.

    A drafter's acceptance head learns from the same micro-batches with its own loss and optimizer; see
    ``osd.learning.head_training``.

    Attributes:
        drafter: the drafter.
        steps: the number of micro-steps.
        skipped: the number of skipped micro-steps and updates.
        head_loss: the last loss of the acceptance head, None before the first.
    """

    def __init__(self, drafter: Trainable, settings: TrainerSettings) -> None:
        self.drafter = drafter
        self.steps = 0
        self.skipped = 0
        self._settings = settings
        self._trained = drafter.trained()
        self._head = None if drafter.acceptance is None else HeadTraining(drafter, settings)
        self.head_loss: float | None = None
        paces: defaultdict[float, list[Tensor]] = defaultdict(list)
        for name, weight in self._trained.items():
            paces[drafter.pace(name)].append(weight)
        groups = [{"params": weights, "lr": settings.learning_rate * pace} for pace, weights in paces.items()]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self._gathered = 0
        self._kept: list[float] = []
        self._norms: deque[float] = deque(maxlen=_MAX_NORMS)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Adapt the draft vocabulary to token counts [target vocabulary]; trained weights are kept."""
        self.drafter.adapt_vocabulary(counts)

    @property
    def weights(self) -> list[Tensor]:
        """Trained tensors, those of the acceptance head last."""
        return [*self._trained.values(), *([] if self._head is None else self._head.weights)]

    @property
    def counts(self) -> Counts:
        """Content of the gathered gradients; a group of trainers sets the sums over its processes."""
        weight, labels = (0.0, 0) if self._head is None else self._head.counts
        return self._gathered, weight, labels

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._gathered = counts[0]
        if self._head is not None:
            self._head.counts = counts[1:]

    def step(self, batch: DistillBatch) -> MicroStep:
        """Gather the gradients of a micro-batch, and apply them if enough are gathered."""
        step = self.gather(batch)
        return step if self.settle() else MicroStep(step.loss, True)

    def gather(self, batch: DistillBatch) -> MicroStep:
        """Add the gradients of a micro-batch to the gathered gradients, without an update; return its loss."""
        self.drafter.train()
        if self._head is not None:
            loss = self._head.gather(batch, self.steps)
            self.head_loss = self.head_loss if loss is None else loss
        with products(self._settings.precision, self.drafter.device):
            loss = self.drafter.loss(batch, DistillationObjective.of(self._settings, self.steps, self._kept))
        value = float(loss.value.detach())
        if not loss.value.requires_grad:
            return MicroStep(value, True)
        if not math.isfinite(value):
            self.skipped += 1
            return MicroStep(value, True)
        (loss.value * loss.positions).backward()
        self._gathered += loss.positions
        self._note(loss.kept)
        self.steps += 1
        return MicroStep(value, False)

    def settle(self) -> bool:
        """Apply gradients if enough are gathered; return False if an update of the drafter was skipped."""
        if self._head is not None:
            self._head.settle()
        return self._gathered < self._settings.update_tokens or self.update()

    def update(self) -> bool:
        """Apply the gathered gradients; return False if the update was skipped."""
        if not self._gathered or all(weight.grad is None for weight in self._trained.values()):
            return True
        sound = apply_gradients(self._optimizer, self._trained.values(), self._gathered, self._is_sound)
        self.skipped += not sound
        self._gathered = 0
        return sound

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and moments as tensors, and counters as JSON values, after applying gathered gradients."""
        self.update()
        moments = optimizer_state(self._optimizer, self._trained, _MOMENT)
        if self._head is not None:
            moments |= self._head.state_dict()
        tensors = {_WEIGHT + name: weight.detach() for name, weight in self.drafter.weights().items()}
        return tensors | moments, {"steps": self.steps, "skipped": self.skipped, "kept": self._kept}

    def load_state_dict(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Restore the values of ``state_dict``.

        Raises:
            DistillerError: moments or counters do not fit this drafter.
            osd.drafting.base.DrafterError: the weights do not fit this drafter.
        """
        try:
            state = read_optimizer_state(tensors, self._trained, _MOMENT)
            head = {} if self._head is None else self._head.read(tensors)
        except OptimizerStateError as error:
            raise DistillerError(str(error)) from None
        try:
            steps, skipped = int(counters["steps"]), int(counters["skipped"])
            kept = [float(rate) for rate in counters["kept"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DistillerError(f"the counters cannot be read: {error!r}") from None
        weights = {key.removeprefix(_WEIGHT): value for key, value in tensors.items() if key.startswith(_WEIGHT)}
        self.load_weights(weights)
        restore(self._optimizer, state)
        if self._head is not None:
            self._head.resume(head)
        self.steps, self.skipped, self._kept = steps, skipped, kept

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Continue with the weights of a version; gathered gradients stay.

        Raises:
            osd.drafting.base.DrafterError: the weights do not fit this drafter.
        """
        self.drafter.load_weights(weights)

    def _note(self, kept: Sequence[float]) -> None:
        """Update the running means with the acceptance at each depth of a micro-step."""
        for depth, rate in enumerate(kept):
            if math.isnan(rate):
                continue
            if depth < len(self._kept):
                self._kept[depth] += _RATE * (rate - self._kept[depth])
            else:
                self._kept.append(rate)

    def _is_sound(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return False
        known = len(self._norms) >= _MIN_NORMS
        spike = known and norm > max(_SPIKE * statistics.median(self._norms), CLIP)
        self._norms.append(norm)
        return not spike
