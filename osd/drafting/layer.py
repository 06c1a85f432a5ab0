"""Base classes of drafters with attention layers and of their sessions."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.session import ANONYMOUS, CommittedTokens, Origin, Runtime
from osd.drafting.shapes import LayerShape, rotate
from osd.drafting.trainable import Trainable
from osd.runtime import attention
from osd.runtime.batch import PackedRows, laid_out, padded_places
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import Stacked

Shape = TypeVar("Shape", bound=LayerShape)
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
NEVER = -1e30
"""Score of a masked pair of attention; it is finite, so that a row without any pair has no NaN."""


class LayerDrafter(Trainable, Generic[Shape], ABC):
    """Trained drafter with one attention layer of a ``shape``."""

    shape: Shape

    def fields(self) -> dict[str, Any]:
        # Older versions lack the field ``rope_scaling``, and versions are compared by their fields.
        return {name: value for name, value in asdict(self.shape).items() if name != "rope_scaling" or value}

    def add_attention(self, width: int) -> None:
        """Add the projections of an attention whose inputs have ``width`` numbers."""
        shape = self.shape
        self.state_width = shape.hidden
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def add_mlp(self, intermediate: int) -> None:
        """Add an MLP with ``intermediate`` inner numbers, and the norm before it."""
        hidden = self.shape.hidden
        self.mlp_norm = nn.RMSNorm(hidden, self.shape.eps)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return rotated queries [..., heads, dim] of inputs ``x`` [..., width] at ``positions`` [...]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)), *self.shape.rotation(positions))

    def keys_values(self, x: Tensor, positions: Tensor, repeats: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, of inputs ``x`` [..., width] at ``positions`` [...].

        Both are [..., kv_heads * repeats, dim], with each head repeated ``repeats`` times in a row. By default each
        head is repeated for each of its query heads, which makes [..., heads, dim].
        """
        each = self.shape.heads // self.shape.kv_heads if repeats is None else repeats
        k, v = (layer(x).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.k_proj, self.v_proj))
        return rotate(k, *self.shape.rotation(positions)).repeat_interleave(each, -2), v.repeat_interleave(each, -2)

    def mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., hidden] plus the output of the MLP."""
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def windows(rows: Tensor, first: Tensor, last: Tensor, bounds: tuple[int, int], count: int) -> Tensor:
    """Return [B, W] consecutive places of each row that cover the ranges ``first`` [N] to ``last`` [N] of ``rows`` [N].

    Places are within ``bounds``, both included; ``count`` is B.
    """
    least, most = bounds
    start = torch.full((count,), most, device=rows.device).scatter_reduce(0, rows, first, "amin").clamp(min=least)
    width = int((last - start[rows]).max().clamp(min=0)) + 1
    return (start[:, None] + torch.arange(width, device=rows.device)).clamp(max=most)


class LayerSession(AutoregressiveSession, ABC):
    """Session of a drafter with ``layers`` attention layers, by default one, whose keys and values are in slots."""

    def __init__(
        self,
        shape: LayerShape,
        weights: dict[str, Tensor],
        runtime: Runtime,
        target_head: Tensor | None = None,
        layers: int = 1,
    ) -> None:
        super().__init__(weights, runtime, target_head)
        places = runtime.context + runtime.scratch
        places = padded_places(places) if self.bucketed else places
        sizes = runtime.slots, shape.kv_heads, places, shape.head_dim
        self.cache = KVCache(layers, *sizes, torch.float32, self.device)
        self._dim, self._eps = shape.head_dim, shape.eps
        cos, sin = shape.rotation(torch.arange(places, device=self.device))
        self.cos, self.sin = cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()  # [places, head_dim]
        self.stacked: dict[tuple[str, ...], Stacked] = {}  # groups of layers that read the same input
        self._unread: dict[int, tuple[list[int], list[Tensor]]] = {}  # by slot, committed tokens and target states

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        super().open(slot, token, origin)
        self.cache.length[slot] = 0
        self._unread[slot] = ([], [])

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        super().commit(slot, kept)
        assert kept.hidden is not None  # noqa: S101  the engine taps the layers in ``needs``
        tokens, states = self._unread[slot]
        if states:  # the drafter was not called since: keep a copy, and not the rows of all sequences of that step
            states[-1] = states[-1].clone()
        tokens.extend(kept.tokens)
        states.append(kept.hidden)

    def close(self, slot: int) -> None:
        super().close(slot)
        self._unread.pop(slot, None)

    def unread(self, slot: int) -> tuple[list[int], list[Tensor]]:
        unread, self._unread[slot] = self._unread[slot], ([], [])
        return unread

    def packed(self, rows: PackedRows, wanted: Tensor) -> tuple[PackedRows, Tensor]:
        """Return rows on the host, and the places ``wanted`` [M] among them, in the layer's layout."""
        return laid_out(rows, wanted, self.cache) if self.bucketed else (rows, wanted)

    def project(self, names: tuple[str, ...], x: Tensor) -> Sequence[Tensor]:
        """Return the outputs of the linear layers ``names`` for ``x`` [..., width]."""
        stacked = self.stacked.get(names)
        if stacked is None:
            return [self.linear[name](x) for name in names]
        return stacked(x).split(stacked.sizes, -1)

    def attended(self, x: Tensor, rows: PackedRows) -> Tensor:
        """Store the keys and values of inputs ``x`` [R, width], and return attention's output [R, heads * dim]."""
        q, k, v = (part.unflatten(-1, (-1, self._dim)) for part in self.project(QKV, x))
        cos, sin = self.cos[rows.positions].unsqueeze(1), self.sin[rows.positions].unsqueeze(1)
        q, k, backend = rotate(q, cos, sin), rotate(k, cos, sin), attention.prepare(rows, self.cache)
        return backend.attend(0, q, k, v, scale=self._dim**-0.5, window=None, softcap=0.0).flatten(-2)

    def mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., hidden] plus the output of the MLP."""
        gate, up = self.project(GATE_UP, self.norm(x, "mlp_norm"))
        return x + self.linear["down_proj"](F.silu(gate) * up)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return ``x`` [..., width] normalised by the vector ``name``."""
        return F.rms_norm(x, x.shape[-1:], self.vector[name], self._eps)
