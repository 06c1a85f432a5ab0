"""The three-way controller of early exits: what it may say of a state, and how sure it has to be to count.

Sun et al., "When Neural Code Completion Models Size up the Situation: Attaining Cheaper and Faster Completion through
Dynamic Model Inference", ICSE 2024 (arXiv 2401.09964).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

STOP, EXIT, CONTINUE = 0, 1, 2
"""What may be said: the token that comes next is wrong whatever is computed, this layer's head has it, or go on."""


def odds(states: Tensor, controller: Tensor) -> Tensor:
    """What the ``controller`` [3, hidden] says of ``states`` [..., hidden], whatever their size: logits [..., 3]."""
    return F.linear(F.rms_norm(states, states.shape[-1:]), controller)


def confident(odds: Tensor, what: int) -> Tensor:
    """[...] the probability of ``what`` where it is more probable than both others, else 0; ``odds`` [..., 3]."""
    said = odds.softmax(-1)
    others = said.clone()
    others[..., what] = 0.0
    return torch.where(said[..., what] > others.amax(-1), said[..., what], 0.0)
