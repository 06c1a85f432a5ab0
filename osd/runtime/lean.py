"""Decoder of Llama-shaped models in few PyTorch operators, for GPUs and their CUDA graphs.

With a small batch, the time of a layer depends first on reading its weights, then on the number of kernels, each of
which takes some microseconds even for little work. The layers of transformers have about twice as many kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from osd.runtime import attention, eight_bits
from osd.runtime.batch import PackedRows
from osd.runtime.causal_lm import decoder_of, ends_of
from osd.runtime.decoder import Forward, joined, window_of
from osd.runtime.gpu.elementwise import Rotation, add_norm, gate
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import Stacked


class LeanDecoder:
    """Decoder of a ``llama_shaped`` model over the slots of ``cache``; it shares all weights.

    Projections of the same input become one: their weights move into one tensor, and the model's own become views of
    it, so that weights copied into the model reach the decoder.
    """

    def __init__(self, model: nn.Module, cache: KVCache, taps: tuple[int, ...], weights: str = "full") -> None:
        """Rearrange the weights of ``model``, which may not be reallocated later.

        With ``weights`` other than "full", linear layers have 8-bit weights, see ``osd.runtime.eight_bits``, and the
        combined projections of the model itself become empty.
        """
        config: Any = model.config
        decoder = decoder_of(model)
        self._norm = decoder.norm
        self._embedding, self._head = ends_of(model)
        self._cache, self._taps, self._window = cache, taps, window_of(config)
        self._eps = float(config.rms_norm_eps)
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
        """Run ``layers`` in the dtype of the embedding, see ``Decoder.forward``."""
        backend = attention.prepare(rows, self._cache)
        # [R, hidden]
        x = self._embedding(rows.token_ids) if states is None else states.to(self._embedding.weight.dtype)
        rotation = Rotation(self._cos, self._sin, rows.positions)
        turned = self._heads + self._kv_heads
        tapped: dict[int, Tensor] = {}
        _, normed = add_norm(x, None, self._layers[layers.start][0].input_layernorm.weight, self._eps)
        for index in layers:
            layer, read, widen = self._layers[index]
            parts = read(normed).unflatten(-1, (-1, self._dim))  # [R, q + k + v, dim]
            turn, value = rotation.turn(parts[:, :turned]), parts[:, turned:]
            query, key = turn[:, : self._heads], turn[:, self._heads :]
            mixed = backend.attend(index, query, key, value, scale=self._dim**-0.5, window=self._window, softcap=0.0)
            mixed = layer.self_attn.o_proj(mixed.flatten(-2))
            x, normed = add_norm(x, mixed, layer.post_attention_layernorm.weight, self._eps)
            following = self._norm if index + 1 == layers.stop else self._layers[index + 1][0].input_layernorm
            x, normed = add_norm(x, layer.mlp.down_proj(gate(widen(normed))), following.weight, self._eps)
            if index in self._taps:
                tapped[index] = x
        logits = self._head(normed[wanted]).float()
        return Forward(logits, joined(tapped, self._taps, layers), x if layers.stop < len(self._layers) else None)

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values of ``layers``, with their key projections only, see ``Decoder.fill``."""
        x = states.to(self._embedding.weight.dtype)
        rotation = Rotation(self._cos, self._sin, rows.positions)
        for index in layers:
            layer, read, _ = self._layers[index]
            _, normed = add_norm(x, None, layer.input_layernorm.weight, self._eps)
            parts = read(normed).unflatten(-1, (-1, self._dim))  # [R, q + k + v, dim]
            key, value = parts[:, self._heads :].split(self._kv_heads, 1)
            self._cache.store(index, rows.slots, rows.stores, rotation.turn(key), value)
