"""What heads inside the target make of its states; training, drafting and lossy answers read them alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def adapted(states: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``states`` [..., n, hidden] as n heads change them, with ``down`` [n, rank, hidden] and ``up`` [n, hidden, rank].

    Without a batch dimension n are states, each with the head that stands beside it.
    """
    inner = torch.einsum("...nh,nrh->...nr", F.rms_norm(states, states.shape[-1:]), down)
    return states + torch.einsum("...nr,nhr->...nh", inner, up)
