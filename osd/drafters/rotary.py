"""The rotary embedding of a drafter's own attention (Su et al., "RoFormer", arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, dim] of the angles at ``positions`` [...], for heads of ``dim`` and base ``theta``."""
    inverse = theta ** -(torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angles = (positions.float()[..., None] * inverse).repeat(*([1] * positions.dim()), 2)
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [..., heads, dim]; the two halves of dim are the planes' axes."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
