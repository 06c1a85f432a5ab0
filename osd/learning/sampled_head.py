"""Which rows of its head a drafter has to read for one micro-batch: those that the target names, and some others.

A softmax over a sample of the vocabulary (Jean et al. 2015, arXiv 1412.2007): ids that are not named differ only in how
much of the mass they take together, so that a uniform sample of them stands for all, each with its logit raised by the
log of how many it stands for (Bengio and Senecal 2008). The sum of exponentials is then right on average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from osd.drafters.trainable import Sampled


def sampled(named: Tensor, vocabulary: int, negatives: int, step: int) -> Sampled | None:
    """The places ``named`` [n] of a draft vocabulary, -1 for none, and ``negatives`` others, keyed by the ``step``.

    None where that would be almost all of it, and where ``negatives`` is 0.
    """
    others = torch.ones(vocabulary, dtype=torch.bool, device=named.device)
    others[named[named >= 0]] = False
    unnamed = others.nonzero().squeeze(-1)
    if not negatives or 2 * negatives > len(unnamed):
        return None
    # Keyed, so that training goes on from a checkpoint as if it had not stopped.
    order = torch.randperm(len(unnamed), generator=torch.Generator().manual_seed(step))[:negatives]
    chosen = unnamed[order.to(unnamed.device)]
    mine = (~others).nonzero().squeeze(-1)
    raised = torch.zeros(len(mine) + negatives, device=named.device)
    raised[len(mine) :] = math.log(len(unnamed) / negatives)
    return Sampled(torch.cat([mine, chosen]), raised)
