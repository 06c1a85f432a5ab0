"""Training of a drafter's acceptance head on the verdicts of verification, which every trace contains."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.capture.trace import ACCEPTED, REJECTED
from osd.config import TrainerSettings
from osd.drafting.base import OPTIONAL, DrafterError
from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch
from osd.learning.optimizer import State, apply_gradients, optimizer_state, products, read_optimizer_state, restore

_REJECTED_WEIGHT = 6.0  # weight of the loss at a rejected token
_MIXED = 0.15  # share of drafted tokens that are replaced by the target's token

_MOMENT = "acceptance_optimizer."


class HeadTraining:
    """Training of a drafter's acceptance head, without changes to the drafter.

    At each drafted position the head reads the drafter's state after the drafted token Y, or with probability 0.15
    after the target's token X (token mixing), because a draft may continue after either. The label is the verdict on Y,
    so a position where the head reads another token has no label. With log-odds z the loss is

        (6 sum over rejected of softplus(z) + sum over accepted of softplus(-z)) / (6 rejected + accepted)

    The paper uses the probability min(1, p(Y) / q(Y)) as label; here the verdict is a draw with this probability, under
    the sampling settings of the request. AdamW updates the head after ``trainer.update_tokens`` labels, at the
    drafter's learning rate. Updates that are not finite are skipped.

    Huang, Guo and Wang, "SpecDec++", COLM 2025 (arXiv 2405.19715): weight 6, mixing 0.15, three blocks.
    """

    def __init__(self, drafter: Trainable, settings: TrainerSettings) -> None:
        """Prepare the training of the head of ``drafter``.

        Raises:
            DrafterError: the drafter has no acceptance head.
        """
        if drafter.acceptance is None:
            raise DrafterError(f"this {drafter.kind} drafter has no acceptance head to train")
        self._drafter, self._head, self._settings = drafter, drafter.acceptance, settings
        self._weights: dict[str, Tensor] = {OPTIONAL + name: w for name, w in self._head.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=settings.learning_rate, betas=(0.9, 0.95))
        self._gathered, self._labels = 0.0, 0

    @property
    def counts(self) -> tuple[float, int]:
        """Total weight and number of labels of the gathered gradients; a group of trainers sets the sums."""
        return self._gathered, self._labels

    @counts.setter
    def counts(self, counts: tuple[float, int]) -> None:
        self._gathered, self._labels = counts

    @property
    def weights(self) -> list[Tensor]:
        """Trained tensors."""
        return list(self._weights.values())

    def gather(self, batch: DistillBatch, number: int) -> float | None:
        """Add the gradients of micro-batch ``number`` and return its loss, or None if it has no labels."""
        labelled = self.odds(batch, number)
        if labelled is None:
            return None
        odds, accepted = labelled
        weight = torch.where(accepted, 1.0, _REJECTED_WEIGHT)
        total = float(weight.sum())
        loss = (weight * F.softplus(torch.where(accepted, -odds, odds))).sum()
        value = float(loss.detach()) / total
        if math.isfinite(value):
            loss.backward()
            self._gathered += total
            self._labels += len(odds)
        return value

    def settle(self) -> None:
        """Update the head if enough labels are gathered."""
        if self._labels >= self._settings.update_tokens:
            self.update()

    def odds(self, batch: DistillBatch, number: int) -> tuple[Tensor, Tensor] | None:
        """Return the head's log-odds [M] at labelled positions, and the labels [M] bool (True for accepted).

        The result is None if the batch has no labels.

        Args:
            batch: the micro-batch.
            number: the number of the micro-batch, the seed of token mixing.
        """
        tested = ((batch.verdict == ACCEPTED) | (batch.verdict == REJECTED)) & (batch.drafted >= 0)
        # The seed makes training after a checkpoint equal to training without interruption.
        generator = torch.Generator().manual_seed(number)
        mixed = torch.rand(batch.positions, generator=generator).to(tested.device) < _MIXED
        true = batch.token_ids[batch.sequence, batch.place]
        fed = torch.where(mixed, true, batch.drafted)
        depth = drafted_depths(batch).clamp(max=max(1, (self._drafter.levels or self._settings.unroll) - 1))  # [N]
        known = tested & (batch.place > depth)
        if not known.any():
            return None
        known_batch = dataclasses.replace(batch, sequence=batch.sequence[known], place=batch.place[known])
        fed, drafted, depth = fed[known], batch.drafted[known], depth[known]
        with torch.no_grad(), products(self._settings.precision, self._drafter.device):
            states = torch.stack(self._drafter.drafted_states(known_batch, fed, int(depth.max())))  # [depths, M, width]
        states = states[depth - 1, torch.arange(len(depth), device=depth.device)]
        labelled = fed == drafted
        if not labelled.any():
            return None
        return self._head(states[labelled]), (batch.verdict == ACCEPTED)[known][labelled]

    def update(self) -> None:
        """Apply the gathered gradients."""
        if self._labels:
            apply_gradients(self._optimizer, self._weights.values(), self._gathered)
            self._gathered, self._labels = 0.0, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's moments after applying gathered gradients; the drafter stores the weights."""
        self.update()
        return optimizer_state(self._optimizer, self._weights, _MOMENT)

    def read(self, tensors: dict[str, Tensor]) -> State:
        """Return the optimizer state in the tensors of ``state_dict``; it is empty for a checkpoint without a head.

        Raises:
            osd.learning.optimizer.OptimizerStateError: the tensors do not fit this head.
        """
        return read_optimizer_state(tensors, self._weights, _MOMENT)

    def resume(self, state: State) -> None:
        """Restore an optimizer state from ``read``."""
        restore(self._optimizer, state)


def drafted_depths(batch: DistillBatch) -> Tensor:
    """Return the depth of each position in its draft, [N], from 1 on.

    A draft begins after a rejection, after a token that was not drafted, and at the first position of a sequence in the
    batch.
    """
    index = torch.arange(batch.positions, device=batch.place.device)
    goes_on = (batch.verdict == ACCEPTED).roll(1) & (batch.sequence == batch.sequence.roll(1)) & (index > 0)
    return index - torch.where(goes_on, 0, index).cummax(0).values + 1
