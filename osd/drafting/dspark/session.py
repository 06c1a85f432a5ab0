"""DSpark's session: blocks over KV slots, many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.autoregressive import WholeDraft
from osd.drafting.graph_chains import ChainDraws
from osd.drafting.growth import Stop
from osd.drafting.layer import GATE_UP, QKV, LayerSession
from osd.drafting.session import Runtime
from osd.drafting.shapes import DSparkShape, rotate
from osd.runtime import attention
from osd.runtime.attention import AttentionBackend
from osd.runtime.batch import PackedRows, RowBuilder
from osd.runtime.device import to_device
from osd.runtime.memory import recycled
from osd.verification.tree import DraftBatch, TreeBuilder


class DSparkSession(LayerSession):
    """Session of a DSpark drafter.

    The call for a root reads the unread target states, whose keys and values stay in the slot, and computes the states
    of a block at the places after them. These outputs are kept until the next proposal: the logits after a node of
    depth k are those of place k of the block plus the bias by the node's token. Expanding nodes takes no further call.
    """

    source = "dspark"

    def __init__(
        self, shape: DSparkShape, weights: dict[str, Tensor], ends: tuple[Tensor, nn.Module, Tensor], runtime: Runtime
    ) -> None:
        """Draft with ``weights`` and the target's ``ends``: embedding on the runtime's device, final norm and head."""
        self._embedding, norm, head = ends
        layers = [f"layers.{number}." for number in range(shape.layers)]
        products, norms = (*QKV, "o_proj", *GATE_UP, "down_proj"), ("input_norm", "q_norm", "k_norm", "mlp_norm")
        self.LINEAR = ("fc", *(layer + name for layer in layers for name in products), "markov_out", "head")
        self.VECTORS = ("context_norm", *(layer + name for layer in layers for name in norms), "markov_in")
        super().__init__(shape, weights, runtime, head, shape.layers)
        self._layers, self._mask, self.levels = layers, shape.mask, shape.block
        self._most = min(shape.block, runtime.scratch)  # places of a block that fit behind every sequence
        self._final_norm = deepcopy(norm).to(self.device)
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}  # by slot: states and logits of all places

    def close(self, slot: int) -> None:
        super().close(slot)
        self._blocks.pop(slot, None)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        owners = [slots[row] for row in rows.tolist()]
        roots = [slot for slot, node in zip(owners, nodes.tolist(), strict=True) if node < 0]
        if roots:
            outputs = zip(*self._run(roots, min(self._most, builder.capacity + 1)), strict=True)
            self._blocks.update(zip(roots, outputs, strict=True))
        is_root, node = nodes < 0, nodes.clamp(min=0)
        depths = torch.where(is_root, 0, builder.depths[rows, node]).tolist()
        last = to_device([self._last[slot] for slot in owners], self.device)
        before = self.vector["markov_in"][torch.where(is_root, last, builder.tokens[rows, node])]  # [M, rank]
        blocks = [self._blocks[slot] for slot in owners]
        drawn_at = torch.stack([states[max(k - 1, 0)] for (states, _), k in zip(blocks, depths, strict=True)])
        self.states = torch.cat([drawn_at, before], -1)
        place = recycled((len(blocks), blocks[0][1].shape[-1]), torch.float32, self.device)
        logits = torch.stack([logits[k] for (_, logits), k in zip(blocks, depths, strict=True)], out=place)
        return logits.add_(self.linear["markov_out"](before))

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        drafting = [index for index, limit in enumerate(limits) if limit]
        if stop.above is not None or not drafting:
            return None
        chosen = [slots[index] for index in drafting]
        _, logits = self._run(chosen, max(limits))  # [D, levels, draft vocabulary]
        last, tokens = to_device([self._last[slot] for slot in chosen], self.device), list[Tensor]()
        for level in range(logits.shape[1]):
            logits[:, level] += self.linear["markov_out"](self.vector["markov_in"][last])
            last = self.vector["draft_ids"][logits[:, level].argmax(-1)]
            tokens.append(last)
        sizes = stop.sizes(to_device([limits[index] for index in drafting], self.device), logits)
        drafted = torch.stack(tokens, 1)
        if len(drafting) < len(slots):
            places = to_device(drafting, self.device)
            drafted, sizes, logits = (_spread(part, places, len(slots)) for part in (drafted, sizes, logits))
        return WholeDraft(DraftBatch.chains(drafted, sizes, self.support), logits, pending=self.bucketed)

    def _run(self, slots: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
        """Read the unread target states of ``slots``, and run the first ``size`` places of their blocks.

        Returns:
            The states [B, size, hidden] before the head, and the logits [B, size, draft vocabulary] without the bias by
            the token before.
        """
        context, block, hidden = RowBuilder(), RowBuilder(), list[Tensor]()
        for slot in slots:
            start, (tokens, states) = self.cache.length[slot], self.unread(slot)
            end = self.cache.length[slot] = start + len(tokens)
            context.tokens(slot, start, tokens)
            block.tokens(slot, end, [self._last[slot], *[self._mask] * (size - 1)])
            hidden += states
        if hidden:
            self._store(context.build(), torch.cat(hidden))
        rows, _ = self.packed(block.build(), torch.arange(len(block)))
        backend = attention.prepare(rows, self.cache)
        x = self._embedding[rows.token_ids].float()
        for number in range(len(self._layers)):
            x = self._layer(number, x, rows, backend)
        states = self._final_norm(x)
        logits = self.linear["head"](states)
        return states.unflatten(0, (-1, size)), logits.unflatten(0, (-1, size))

    def _store(self, rows: PackedRows, hidden: Tensor) -> None:
        """Store the keys and values of the target's states ``hidden`` [R, taps * hidden] in all layers."""
        context = self.norm(self.linear["fc"](hidden.float()), "context_norm")
        slots, places = rows.slots.long().to(self.device), rows.positions.to(self.device)
        for number in range(len(self._layers)):
            self.cache.store(number, slots, places, *self._keys_values(number, context, places))

    def _layer(self, number: int, x: Tensor, rows: PackedRows, backend: AttentionBackend) -> Tensor:
        """Return the output [R, hidden] of a layer for the states ``x`` of the same shape."""
        name = self._layers[number]
        y = self.norm(x, name + "input_norm")
        q = self._rotated(self.linear[name + "q_proj"](y), name + "q_norm", rows.positions)
        k, v = self._keys_values(number, y, rows.positions)
        mixed = backend.attend(number, q, k, v, scale=self._dim**-0.5, window=None, softcap=0.0)
        x = x + self.linear[name + "o_proj"](mixed.flatten(-2))
        y = self.norm(x, name + "mlp_norm")
        gate, up = (self.linear[name + part](y) for part in GATE_UP)
        return x + self.linear[name + "down_proj"](F.silu(gate) * up)

    def _keys_values(self, number: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, [R, kv_heads, dim] of ``x`` [R, hidden] in a layer."""
        name = self._layers[number]
        keys = self._rotated(self.linear[name + "k_proj"](x), name + "k_norm", positions)
        return keys, self.linear[name + "v_proj"](x).unflatten(-1, (-1, self._dim))

    def _rotated(self, x: Tensor, norm: str, positions: Tensor) -> Tensor:
        """Return the normalised and rotated heads [R, heads, dim] of ``x`` [R, heads * dim]."""
        heads = self.norm(x.unflatten(-1, (-1, self._dim)), norm)
        return rotate(heads, self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def _spread(part: Tensor, places: Tensor, count: int) -> Tensor:
    """Return [count, ...] with the entries of ``part`` [D, ...] at ``places`` [D], and 0 elsewhere."""
    return part.new_zeros(count, *part.shape[1:]).index_copy_(0, places, part)
