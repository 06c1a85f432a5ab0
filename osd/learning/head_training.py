"""What an acceptance head learns: which drafted tokens verification kept. The labels are in every trace."""

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

_REJECTED_WEIGHT = 6.0  # of the loss of a rejected token
_MIXED = 0.15  # of the drafted tokens give way to the target's own

_MOMENT = "acceptance_optimizer."


class HeadTraining:
    """Trains a drafter's acceptance head beside the drafter, which this leaves as it is.

    At each place that was drafted the head reads the drafter's state after the drafted token Y, or with probability
    0.15 after the target's own token X (token mixing): a draft goes on after either. The label is what verification
    decided of Y, so that there is none where the head has read another token. With log-odds z the loss is

        (6 sum over rejected of softplus(z) + sum over accepted of softplus(-z)) / (6 rejected + accepted)

    which is the paper's with what was drawn in the place of its probability min(1, p(Y) / q(Y)), under the sampling
    settings of the request. Updates are AdamW's, after ``trainer.update_tokens`` labels, at the drafter's learning
    rate; one that is not finite is left out.

    Huang, Guo and Wang, "SpecDec++", COLM 2025 (arXiv 2405.19715): weight 6, mixing 0.15, three blocks.
    """

    def __init__(self, drafter: Trainable, settings: TrainerSettings) -> None:
        """Train the head that ``drafter`` has."""
        if drafter.acceptance is None:
            raise DrafterError(f"this {drafter.kind} drafter has no acceptance head to train")
        self._drafter, self._head, self._settings = drafter, drafter.acceptance, settings
        self._weights: dict[str, Tensor] = {OPTIONAL + name: w for name, w in self._head.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=settings.learning_rate, betas=(0.9, 0.95))
        self._gathered, self._labels = 0.0, 0

    @property
    def counts(self) -> tuple[float, int]:
        """Weight and number of the labels that the gathered gradients cover; whoever adds gradients sets it."""
        return self._gathered, self._labels

    @counts.setter
    def counts(self, counts: tuple[float, int]) -> None:
        self._gathered, self._labels = counts

    @property
    def weights(self) -> list[Tensor]:
        """What is trained."""
        return list(self._weights.values())

    def gather(self, batch: DistillBatch, number: int) -> float | None:
        """Add the gradients of a micro-batch, the ``number``-th; returns its loss, None where nothing was drafted."""
        found = self.odds(batch, number)
        if found is None:
            return None
        odds, accepted = found
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
        """Update once enough is gathered."""
        if self._labels >= self._settings.update_tokens:
            self.update()

    def odds(self, batch: DistillBatch, number: int) -> tuple[Tensor, Tensor] | None:
        """The head's log-odds [M] where there are labels, and the labels [M] bool; None where there are none."""
        tested = ((batch.verdict == ACCEPTED) | (batch.verdict == REJECTED)) & (batch.drafted >= 0)
        # Keyed by the step, so that training goes on from a checkpoint as if it had not stopped.
        generator = torch.Generator().manual_seed(number)
        mixed = torch.rand(batch.positions, generator=generator).to(tested.device) < _MIXED
        true = batch.token_ids[batch.sequence, batch.place]
        fed = torch.where(mixed, true, batch.drafted)
        depth = drafted_depths(batch).clamp(max=max(1, (self._drafter.levels or self._settings.unroll) - 1))  # [N]
        known = tested & (batch.place > depth)
        if not known.any():
            return None
        asked = dataclasses.replace(batch, sequence=batch.sequence[known], place=batch.place[known])
        fed, drafted, depth = fed[known], batch.drafted[known], depth[known]
        with torch.no_grad(), products(self._settings.precision, self._drafter.device):
            states = torch.stack(self._drafter.drafted_states(asked, fed, int(depth.max())))  # [depths, M, width]
        states = states[depth - 1, torch.arange(len(depth), device=depth.device)]
        labelled = fed == drafted
        if not labelled.any():
            return None
        return self._head(states[labelled]), (batch.verdict == ACCEPTED)[known][labelled]

    def update(self) -> None:
        """Apply the gradients gathered so far."""
        if self._labels:
            apply_gradients(self._optimizer, self._weights.values(), self._gathered)
            self._gathered, self._labels = 0.0, 0

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's moments; gathered gradients are applied first. The weights are the drafter's."""
        self.update()
        return optimizer_state(self._optimizer, self._weights, _MOMENT)

    def read(self, tensors: dict[str, Tensor]) -> State:
        """What ``state_dict`` gave, for ``resume``; nothing of a state from before there was a head.

        Raises:
            osd.learning.optimizer.OptimizerStateError: it is not this head's.
        """
        return read_optimizer_state(tensors, self._weights, _MOMENT)

    def resume(self, state: State) -> None:
        """Go on from ``state``."""
        restore(self._optimizer, state)


def drafted_depths(batch: DistillBatch) -> Tensor:
    """[N] how deep in its draft the token of each place stood, from 1 on, as far as the places are in the batch.

    After a rejection, or a token that was not drafted, a round ended and the next draft began.
    """
    index = torch.arange(batch.positions, device=batch.place.device)
    goes_on = (batch.verdict == ACCEPTED).roll(1) & (batch.sequence == batch.sequence.roll(1)) & (index > 0)
    return index - torch.where(goes_on, 0, index).cummax(0).values + 1
