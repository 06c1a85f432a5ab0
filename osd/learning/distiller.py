"""Distillation: the drafter learns the distributions that verification has already paid for."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osd.config import TrainerSettings
from osd.drafters.trainable import Trainable
from osd.learning import objective
from osd.learning.acceptance import HeadTraining
from osd.learning.batch import DistillBatch
from osd.learning.divergences import draft_index, overlap
from osd.learning.moments import MomentsError, moments_of, read_moments, set_state
from osd.learning.own_samples import OwnSamples
from osd.learning.positions import weigh

_DECAY = 0.8
"""Weight of each further unrolled step, as in EAGLE-3 (arXiv 2503.01840)."""

_USUAL_LENGTH, _WHOLE_EVERY = 2, 4
"""Steps that most micro-steps unroll at most, and which of them go all the way."""

_CLIP = 0.5
"""Largest global norm of the gradient; a longer one is scaled down."""

_SPIKE = 20.0
"""A gradient that is longer than so many times the median of the last ones is no gradient of this traffic."""

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

    The loss is sum_d 0.8^d times the mean divergence of the positions that exist at unrolled depth d, weighted as
    ``trainer.positions`` says. Every fourth micro-step unrolls ``trainer.unroll`` steps, the others two at most: a
    drafter that was never unrolled as far as it drafts is confident and wrong there, yet what it learns at two depths
    carries over to the next ones, and each step costs as much as the first. Behind the first step the drafter reads the
    target's tokens or, as ``trainer.samples`` says, its own where it was rejected: "mixed" takes turns.

    Gradients add up over micro-steps until they cover ``trainer.update_tokens`` positions with a weight, and then make
    one update by AdamW: how short a micro-step must be has nothing to do with how many positions make a good gradient.

    ``skipped`` counts micro-steps whose loss is not finite, and updates whose gradient is not finite, or longer than
    0.5 and 20 times the median of the last 64: none of them changes a weight. The median takes in the gradients that
    were skipped as well, so that a lasting change of scale is followed after 32 of them. A micro-step without a
    position to learn from is left out, and not counted: nothing was wrong with it.

    A drafter's acceptance head learns from the same micro-batches with a loss and an optimizer of its own, see
    ``osd.learning.acceptance``; ``head_loss`` is its last one, None before there was any.
    """

    def __init__(self, drafter: Trainable, settings: TrainerSettings) -> None:
        self.drafter = drafter
        self.steps = 0
        self.skipped = 0
        self._settings = settings
        self._divergence = objective(settings)
        self._index = draft_index(drafter.draft_ids)
        self._trained = drafter.trained()
        self._head = None if drafter.acceptance is None else HeadTraining(drafter, settings)
        self.head_loss: float | None = None
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=settings.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._gathered = 0
        self._norms: deque[float] = deque(maxlen=_NORMS)

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Let the drafter prefer the tokens of ``counts`` [target vocabulary]; what it has learnt stays."""
        self.drafter.adapt_vocabulary(counts)
        self._index = draft_index(self.drafter.draft_ids)

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
        weights = weigh(batch, self._settings)  # [N]
        positions = int(weights.count_nonzero())
        if self._head is not None:
            loss = self._head.gather(batch, self.steps)
            self.head_loss = self.head_loss if loss is None else loss
        loss = self._loss(batch, weights)
        value = float(loss.detach())
        if not loss.requires_grad:
            return Step(value, True)
        if not math.isfinite(value):
            self.skipped += 1
            return Step(value, True)
        (loss * positions).backward()
        self._gathered += positions
        self.steps += 1
        return Step(value, False)

    def settle(self) -> bool:
        """Make the updates that enough is gathered for; False when the drafter's was lost, see ``update``."""
        if self._head is not None:
            self._head.settle()
        return self._gathered < self._settings.update_tokens or self.update()

    def update(self) -> bool:
        """Apply the gradients gathered so far; False when they were not finite or far too long, and are lost."""
        gradients = [weight.grad for weight in self._trained.values() if weight.grad is not None]
        if not self._gathered or not gradients:
            return True
        norm = float(torch.nn.utils.get_total_norm(gradients)) / self._gathered
        sound = math.isfinite(norm) and not self._is_spike(norm)
        if sound:
            scale = min(1.0, _CLIP / (norm + 1e-6)) / self._gathered
            for gradient in gradients:
                gradient.mul_(scale)
            self._optimizer.step()
        else:
            self.skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._gathered = 0
        return sound

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and optimizer moments as tensors, and the counters as JSON; gathered gradients are applied first."""
        self.update()
        moments = moments_of(self._optimizer, self._trained, _MOMENT)
        if self._head is not None:
            moments |= self._head.state_dict()
        tensors = {_WEIGHT + name: weight.detach() for name, weight in self.drafter.weights().items()}
        return tensors | moments, {"steps": self.steps, "skipped": self.skipped}

    def load_state_dict(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave.

        Raises:
            DistillerError: the moments or the counters are not this drafter's.
            osd.drafters.base.DrafterError: the weights are not this drafter's.
        """
        try:
            state = read_moments(tensors, self._trained, _MOMENT)
            head = {} if self._head is None else self._head.read(tensors)
        except MomentsError as error:
            raise DistillerError(str(error)) from None
        try:
            steps, skipped = int(counters["steps"]), int(counters["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise DistillerError(f"the counters cannot be read: {error!r}") from None
        weights = {key.removeprefix(_WEIGHT): value for key, value in tensors.items() if key.startswith(_WEIGHT)}
        self.load_weights(weights)
        set_state(self._optimizer, state)
        if self._head is not None:
            self._head.resume(head)
        self.steps, self.skipped = steps, skipped

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Go on with the weights of a version; what is gathered stays.

        Raises:
            osd.drafters.base.DrafterError: they are not this drafter's.
        """
        self.drafter.load_weights(weights)
        self._index = draft_index(self.drafter.draft_ids)

    def _is_spike(self, norm: float) -> bool:
        known = len(self._norms) >= _FEWEST_NORMS
        spike = known and norm > max(_SPIKE * statistics.median(self._norms), _CLIP)
        self._norms.append(norm)
        return spike

    def _loss(self, batch: DistillBatch, weights: Tensor) -> Tensor:
        loss = torch.zeros((), device=batch.target_logp.device)
        before: Tensor | None = None
        values = loss
        own = batch.own if self._reads_own() else None
        drafted = None if own is None else own.token_ids
        for depth, logits in enumerate(self.drafter.unroll(batch, self._length(), drafted)):
            rows = batch.rows_at(depth) & (weights > 0)
            kept: DistillBatch | OwnSamples = batch
            if own is not None and depth:
                rows, kept = rows & own.rows_at(depth), own
            if not rows.any():
                break
            # A drafter that reads no hidden states predicts the same at every depth.
            if logits is not before:
                events = overlap(logits, kept.target_ids, kept.target_logp, kept.target_tail, self._index)
                values, before = self._divergence(events), logits
            share = weights[rows] / weights[rows].mean()
            loss = loss + _DECAY**depth * (values[rows] * share).mean()
        return loss

    def _length(self) -> int:
        """Steps that this micro-step unrolls."""
        most = self._settings.unroll
        return most if self.steps % _WHOLE_EVERY == 0 else min(most, _USUAL_LENGTH)

    def _reads_own(self) -> bool:
        """Whether this micro-step unrolls over the drafter's own tokens."""
        samples = self._settings.samples
        turn = self.steps // _WHOLE_EVERY + self.steps  # so that whole ones are read both ways
        return samples == "student" or (samples == "mixed" and turn % 2 == 1)
