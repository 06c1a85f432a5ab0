"""The arithmetic of heads and of the three-way controller: how heads change a state, and how the controller learns.

Sun et al., "When Neural Code Completion Models Size up the Situation: Attaining Cheaper and Faster Completion through
Dynamic Model Inference", ICSE 2024 (arXiv 2401.09964).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.exit_controller import CONTINUE, EXIT, STOP


def adapted(states: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``states`` [..., n, hidden] as n heads change them: ``down`` [n, rank, hidden], ``up`` [n, hidden, rank].

    Without a batch dimension, head i changes row i. Training, drafting and lossy answers share this.
    """
    inner = torch.einsum("...nh,nrh->...nr", F.rms_norm(states, states.shape[-1:]), down)
    return states + torch.einsum("...nr,nhr->...nh", inner, up)


def first_right(said: Tensor, truth: Tensor) -> Tensor:
    """[N] the first of the heads ``said`` [N, heads] that says ``truth`` [N], counted from 1; 0 where none does."""
    right = said == truth[:, None]
    return torch.where(right.any(1), 1 + right.int().argmax(1), 0)


def labels(first: Tensor, heads: int) -> Tensor:
    """[N, heads] what should be said at each of so many heads, where ``first`` [N] is the first that is right."""
    head = torch.arange(1, heads + 1, device=first.device)
    later = torch.where(first[:, None] <= head, EXIT, CONTINUE)
    return torch.where(first[:, None] == 0, STOP, later)


def controller_loss(odds: Tensor, wanted: Tensor, judged: Tensor) -> Tensor:
    """The mean over N positions of sum_i i CE_i / sum_i i over heads i = 1, 2, ..., a scalar.

    Where it is not known whether the text goes wrong, all that a label tells is whether to leave: there the
    cross-entropy is of the distribution that is left without STOP.

    Args:
        odds: [N, heads, 3] logits of the controller.
        wanted: [N, heads] labels; none is STOP where a position is not judged.
        judged: [N] bool, the positions whose next token is known to be right or wrong.
    """
    never = torch.zeros_like(odds, dtype=torch.bool)
    never[..., STOP] = ~judged[:, None]
    each = F.cross_entropy(odds.masked_fill(never, -torch.inf).flatten(0, 1), wanted.flatten(), reduction="none")
    weight = torch.arange(1, odds.shape[1] + 1, device=odds.device, dtype=odds.dtype)
    return (each.view(wanted.shape) * weight).sum(1).mean() / weight.sum()
