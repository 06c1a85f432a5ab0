"""Decoder layer of a DSpark drafter, for training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.layer import NEVER
from osd.drafting.shapes import DSparkShape, rotate


class BlockLayer(nn.Module):
    """Decoder layer over the places of a block, with normalised queries and keys as in Qwen3.

    The keys and values of the context before a block are projections of the target's fused states. They do not depend
    on the drafter's earlier layers.
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Make a layer with random matrices."""
        super().__init__()
        hidden, dim, self.shape = shape.hidden, shape.head_dim, shape
        self.input_norm = nn.RMSNorm(hidden, shape.eps)
        self.q_proj = nn.Linear(hidden, shape.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, shape.eps), nn.RMSNorm(dim, shape.eps)
        self.o_proj = nn.Linear(shape.heads * dim, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, shape.eps)
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)

    def forward(self, x: Tensor, context: Tensor, starts: Tensor) -> Tensor:
        """Return the outputs [B, W, k, hidden] for the states ``x`` of the same shape.

        A place sees the ``context`` [B, P, hidden] before the first place of its block, ``starts`` [B, W]. In its block
        it sees the places before it and itself.
        """
        own = torch.arange(x.shape[2], device=x.device)
        places = torch.arange(context.shape[1], device=x.device)
        positions, y = starts[..., None] + own, self.input_norm(x)  # [B, W, k], [B, W, k, hidden]
        q = self._rotated(self.q_norm, self.q_proj(y), positions) * self.shape.head_dim**-0.5
        keys, values = self._keys_values(context, places)  # [B, P, heads, dim]
        block_keys, block_values = self._keys_values(y, positions)  # [B, W, k, heads, dim]
        unseen = (places >= starts[..., None])[:, None, :, None]  # [B, 1, W, 1, P]
        before = torch.einsum("bwqhd,bphd->bhwqp", q, keys).masked_fill(unseen, NEVER)
        within = torch.einsum("bwqhd,bwphd->bhwqp", q, block_keys).masked_fill(own > own[:, None], NEVER)
        weight = torch.cat([before, within], -1).softmax(-1)
        mixed = torch.einsum("bhwqp,bphd->bwqhd", weight[..., : len(places)], values)
        mixed = mixed + torch.einsum("bhwqp,bwphd->bwqhd", weight[..., len(places) :], block_values)
        x = x + self.o_proj(mixed.flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, of ``x`` [..., hidden]; each head is repeated for its query heads."""
        repeats = self.shape.heads // self.shape.kv_heads
        values = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        keys = self._rotated(self.k_norm, self.k_proj(x), positions)
        return keys.repeat_interleave(repeats, -2), values.repeat_interleave(repeats, -2)

    def _rotated(self, norm: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        """Return the normalised and rotated heads [..., heads, dim] of ``x`` [..., heads * dim] at ``positions``."""
        heads = norm(x.float().unflatten(-1, (-1, self.shape.head_dim)))
        return rotate(heads, *self.shape.rotation(positions))
