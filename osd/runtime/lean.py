"""Llama-shaped models in as few operators as PyTorch has: what a GPU runs, and what its CUDA graphs hold.

A layer of a small batch is bound by how fast its weights are read, and after that by the number of kernels, each of
which takes some microseconds however little it does. transformers' layers have about twice as many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.runtime import attention, eight_bits
from osd.runtime.batch import PackedRows
from osd.runtime.causal_lm import decoder_of, ends_of
from osd.runtime.decoder import Forward, joined, window_of
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import Stacked


class LeanDecoder:
    """A ``llama_shaped`` model over the slots of ``cache``; shares all its weights.

    Projections that read the same input become one: their weights are moved side by side, and those of the model are
    views of them from then on, so that weights copied into the model reach this one.
    """

    def __init__(self, model: nn.Module, cache: KVCache, taps: tuple[int, ...], weights: str = "full") -> None:
        """Rearrange the weights of ``model``, which may not be reallocated afterwards.

        Those of linear layers are held as they come, or in 8 bits, see ``osd.runtime.eight_bits``; the model is then
        left without those that were put together.
        """
        config: Any = model.config
        decoder = decoder_of(model)
        self._norm = decoder.norm
        self._embedding, self._head = ends_of(model)
        self._cache, self._taps, self._window = cache, taps, window_of(config)
        self._eps, self._hidden = float(config.rms_norm_eps), int(config.hidden_size)
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, cache.keys.shape[2], cache.keys.shape[-1]
        self._layers: list[tuple[Any, Stacked, Stacked]] = []
        for layer in decoder.layers:
            read = Stacked([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
            self._layers.append((layer, read, Stacked([layer.mlp.gate_proj, layer.mlp.up_proj])))
        if weights != "full":
            for layer, read, widen in self._layers:
                read.narrow(weights)
                widen.narrow(weights)
                eight_bits.narrow([layer.self_attn.o_proj, layer.mlp.down_proj], weights)
            eight_bits.narrow([self._head], weights)
        weight = self._embedding.weight
        places = torch.arange(cache.places, device=weight.device)
        cos, sin = decoder.rotary_emb(weight.new_empty(1, 1, 1), places[None])
        half = self._dim // 2
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)  # [places, dim]

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """See ``Decoder.forward``."""
        backend = attention.prepare(rows, self._cache)
        # [R, hidden]
        x = self._embedding(rows.token_ids) if states is None else states.to(self._embedding.weight.dtype)
        cos, sin = self._cos[rows.positions].unsqueeze(1), self._sin[rows.positions].unsqueeze(1)  # [R, 1, dim]
        turned = self._heads + self._kv_heads
        tapped: dict[int, Tensor] = {}
        for index in layers:
            layer, read, widen = self._layers[index]
            parts = read(self._normed(x, layer.input_layernorm)).unflatten(-1, (-1, self._dim))  # [R, q + k + v, dim]
            turn, value = parts[:, :turned], parts[:, turned:]
            # The two halves of dim are the planes' axes: one half goes to the other's place.
            turn = torch.addcmul(turn * cos, turn.roll(self._dim // 2, -1), sin)
            query, key = turn[:, : self._heads], turn[:, self._heads :]
            mixed = backend.attend(index, query, key, value, scale=self._dim**-0.5, window=self._window, softcap=0.0)
            x = x + layer.self_attn.o_proj(mixed.flatten(-2))
            gate, up = widen(self._normed(x, layer.post_attention_layernorm)).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
            if index in self._taps:
                tapped[index] = x
        logits = self._head(self._normed(x[wanted], self._norm)).float()
        return Forward(logits, joined(tapped, self._taps, layers), x if layers.stop < len(self._layers) else None)

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """See ``Decoder.fill``."""
        x = states.to(self._embedding.weight.dtype)
        cos, sin = self._cos[rows.positions].unsqueeze(1), self._sin[rows.positions].unsqueeze(1)  # [R, 1, dim]
        for index in layers:
            layer, read, _ = self._layers[index]
            parts = read(self._normed(x, layer.input_layernorm)).unflatten(-1, (-1, self._dim))  # [R, q + k + v, dim]
            key, value = parts[:, self._heads :].split(self._kv_heads, 1)
            key = torch.addcmul(key * cos, key.roll(self._dim // 2, -1), sin)
            self._cache.store(index, rows.slots, rows.stores, key, value)

    def _normed(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, (self._hidden,), norm.weight, self._eps)
