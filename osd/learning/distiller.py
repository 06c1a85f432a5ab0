"""Distillation: the drafter learns the distributions that verification has already paid for."""

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
from osd.learning.objective import Objective
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
"""A gradient that is longer than so many times the median of the last ones is no gradient of this traffic."""

_LATELY = 0.05
"""Of a micro-step in the running mean of acceptance by depth."""

_NORMS = 64
_FEWEST_NORMS = 16

_WEIGHT, _MOMENT = "drafter.", "optimizer."


Counts = tuple[int, float, int]
"""What gathered gradients cover: positions with a weight; weight and number of the acceptance head's labels."""


class DistillerError(ValueError):
    """A saved state does not fit this drafter."""


@dataclass(frozen=True)
class Step:
    """One micro-step: its loss, 0 without a position to learn from, and whether it taught the drafter nothing."""

    loss: float
    skipped: bool


class Distiller:
    """Trains a drafter in micro-steps, each one forward and backward over one micro-batch.

    The drafter computes the loss, see ``osd.learning.objective``.

    Gradients add up over micro-steps until they cover ``trainer.update_tokens`` positions with a weight, and then make
    one update by AdamW: how short a micro-step must be has nothing to do with how many positions make a good gradient.

    ``skipped`` counts micro-steps whose loss is not finite, and updates whose gradient is not finite, or longer than
    0.5 and 20 times the median of the last 64: none of them changes a weight. The median takes in the gradients that
    were skipped as well, so that a lasting change of scale is followed after 32 of them. A micro-step without a
    position to learn from is left out, and not counted: nothing was wrong with it.

    A drafter's acceptance head learns from the same micro-batches with a loss and an optimizer of its own, see
    ``osd.learning.head_training``; ``head_loss`` is its last one, None before there was any.
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
        self._norms: deque[float] = deque(maxlen=_NORMS)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Let the drafter prefer the tokens of ``counts`` [target vocabulary]; what it has learnt stays."""
        self.drafter.adapt_vocabulary(counts)

    @property
    def weights(self) -> list[Tensor]:
        """Every weight that is trained, the acceptance head's last."""
        return [*self._trained.values(), *([] if self._head is None else self._head.weights)]

    @property
    def counts(self) -> Counts:
        """What the gathered gradients cover; whoever adds gradients of others sets it."""
        weight, labels = (0.0, 0) if self._head is None else self._head.counts
        return self._gathered, weight, labels

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._gathered = counts[0]
        if self._head is not None:
            self._head.counts = counts[1:]

    def step(self, batch: DistillBatch) -> Step:
        """Do one micro-step."""
        step = self.gather(batch)
        return step if self.settle() else Step(step.loss, True)

    def gather(self, batch: DistillBatch) -> Step:
        """Add the gradients of a micro-batch to those gathered so far."""
        self.drafter.train()
        if self._head is not None:
            loss = self._head.gather(batch, self.steps)
            self.head_loss = self.head_loss if loss is None else loss
        with products(self._settings.precision, self.drafter.device):
            loss = self.drafter.loss(batch, Objective.of(self._settings, self.steps, self._kept))
        value = float(loss.value.detach())
        if not loss.value.requires_grad:
            return Step(value, True)
        if not math.isfinite(value):
            self.skipped += 1
            return Step(value, True)
        (loss.value * loss.positions).backward()
        self._gathered += loss.positions
        self._note(loss.kept)
        self.steps += 1
        return Step(value, False)

    def settle(self) -> bool:
        """Make the updates that enough is gathered for; False when the drafter's was lost, see ``update``."""
        if self._head is not None:
            self._head.settle()
        return self._gathered < self._settings.update_tokens or self.update()

    def update(self) -> bool:
        """Apply the gradients gathered so far; False when they were not finite or far too long, and are lost."""
        if not self._gathered or all(weight.grad is None for weight in self._trained.values()):
            return True
        sound = apply_gradients(self._optimizer, self._trained.values(), self._gathered, self._is_sound)
        self.skipped += not sound
        self._gathered = 0
        return sound

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and optimizer moments as tensors, and the counters as JSON; gathered gradients are applied first."""
        self.update()
        moments = optimizer_state(self._optimizer, self._trained, _MOMENT)
        if self._head is not None:
            moments |= self._head.state_dict()
        tensors = {_WEIGHT + name: weight.detach() for name, weight in self.drafter.weights().items()}
        return tensors | moments, {"steps": self.steps, "skipped": self.skipped, "kept": self._kept}

    def load_state_dict(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave.

        Raises:
            DistillerError: the moments or the counters are not this drafter's.
            osd.drafting.base.DrafterError: the weights are not this drafter's.
        """
        try:
            state = read_optimizer_state(tensors, self._trained, _MOMENT)
            head = {} if self._head is None else self._head.read(tensors)
        except OptimizerStateError as error:
            raise DistillerError(str(error)) from None
        try:
            steps, skipped = int(counters["steps"]), int(counters["skipped"])
            kept = [float(one) for one in counters["kept"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DistillerError(f"the counters cannot be read: {error!r}") from None
        weights = {key.removeprefix(_WEIGHT): value for key, value in tensors.items() if key.startswith(_WEIGHT)}
        self.load_weights(weights)
        restore(self._optimizer, state)
        if self._head is not None:
            self._head.resume(head)
        self.steps, self.skipped, self._kept = steps, skipped, kept

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Go on with the weights of a version; what is gathered stays.

        Raises:
            osd.drafting.base.DrafterError: they are not this drafter's.
        """
        self.drafter.load_weights(weights)

    def _note(self, kept: Sequence[float]) -> None:
        """Take in the acceptance of each depth of a micro-step."""
        for depth, rate in enumerate(kept):
            if math.isnan(rate):
                continue
            if depth < len(self._kept):
                self._kept[depth] += _LATELY * (rate - self._kept[depth])
            else:
                self._kept.append(rate)

    def _is_sound(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return False
        known = len(self._norms) >= _FEWEST_NORMS
        spike = known and norm > max(_SPIKE * statistics.median(self._norms), CLIP)
        self._norms.append(norm)
        return not spike
