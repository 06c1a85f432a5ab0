"""Which positions of a trace are learned from, and how much each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.capture.trace import REJECTED
from osd.config import TrainerSettings
from osd.learning.batch import DistillBatch


def weigh(batch: DistillBatch, settings: TrainerSettings) -> Tensor:
    """The weight of each position, [N] float32, as ``trainer.positions`` says.

    ``all`` weighs every position 1; ``rejected`` only those where a draft token was rejected; ``weighted`` gives these
    ``trainer.rejected_weight`` and all others 1. A rejected position is the one whose distributions disagreed: the
    place of the token that the target put in the drafted one's stead, and not the place after it. The bonus token of
    a round that was accepted whole was never drafted, and is not among them.
    """
    ones = torch.ones_like(batch.target_tail)
    rejected = batch.verdict == REJECTED
    if settings.positions == "rejected":
        return torch.where(rejected, ones, 0.0)
    if settings.positions == "weighted":
        return torch.where(rejected, settings.rejected_weight, ones)
    return ones
