"""Three-way controller of early exits, and the confidence that its decisions need.

Sun et al., "When Neural Code Completion Models Size up the Situation: Attaining Cheaper and Faster Completion through
Dynamic Model Inference", ICSE 2024 (arXiv 2401.09964).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

STOP, EXIT, CONTINUE = 0, 1, 2
"""Decisions: stop, as the next token will be wrong; exit with this layer's token; continue with the next layer."""


def odds(states: Tensor, controller: Tensor) -> Tensor:
    """Return the controller's logits [..., 3] for ``states`` [..., hidden], which are normalised first.

    ``controller`` is [3, hidden].
    """
    return F.linear(F.rms_norm(states, states.shape[-1:]), controller)


def confident(odds: Tensor, decision: int) -> Tensor:
    """Return [...], the probability of ``decision`` if it is the most probable, else 0, from logits [..., 3]."""
    p = odds.softmax(-1)
    rivals = p.clone()
    rivals[..., decision] = 0.0
    return torch.where(p[..., decision] > rivals.amax(-1), p[..., decision], 0.0)
