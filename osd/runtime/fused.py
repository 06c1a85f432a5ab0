"""Decoder of Llama-shaped models that runs all layers in one call of our CPU kernels.

Llama, Mistral and Qwen2 share one kind of layer: RMS norms, rotary embedding, grouped heads, SwiGLU. Any other model
runs through transformers' own code with ``slot_attention``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from osd.runtime.batch import PackedRows
from osd.runtime.causal_lm import decoder_of, ends_of
from osd.runtime.decoder import Forward, llama_shaped, window_of
from osd.runtime.exit_rule import ExitRule, PartialForward
from osd.runtime.kv_cache import KVCache, heads_of
from osd.runtime.linear import PackedLinear
from osd.runtime.memory import recycled
from osd.runtime.native import DTYPES, WEIGHT_DTYPES, call_kernel, kernels, structs


def fusable(model: nn.Module) -> bool:
    """Return whether ``FusedDecoder`` can compute ``model`` on this machine."""
    config: Any = model.config
    return (
        llama_shaped(model)
        and type(decoder_of(model).layers[0].self_attn.o_proj) is nn.Linear  # else a shard
        and kernels() is not None
        and next(model.parameters()).device.type == "cpu"
        and next(model.parameters()).dtype in DTYPES
        and heads_of(config)[1] % 8 == 0
    )


class FusedDecoder:
    """Decoder of a ``fusable`` model whose linear layers are ``PackedLinear``; it shares all weights."""

    def __init__(self, model: nn.Module, cache: KVCache, taps: tuple[int, ...]) -> None:
        """Use the weights of ``model`` and the slots of ``cache`` at their addresses, which may not change later."""
        config: Any = model.config
        decoder = decoder_of(model)
        self._head: PackedLinear = ends_of(model)[1]
        embedding, norm = decoder.embed_tokens.weight, decoder.norm.weight
        layers = (structs.Layer * len(decoder.layers))()
        for index, layer in enumerate(decoder.layers):
            parts: dict[str, PackedLinear] = {
                "q": layer.self_attn.q_proj,
                "k": layer.self_attn.k_proj,
                "v": layer.self_attn.v_proj,
                "o": layer.self_attn.o_proj,
                "gate": layer.mlp.gate_proj,
                "up": layer.mlp.up_proj,
                "down": layer.mlp.down_proj,
            }
            for name, part in parts.items():
                setattr(layers[index], name, part.packed.data_ptr())
                if part.bias is not None:
                    setattr(layers[index], f"{name}_bias", part.bias.data_ptr())
            layers[index].input_norm = layer.input_layernorm.weight.data_ptr()
            layers[index].post_norm = layer.post_attention_layernorm.weight.data_ptr()
            layers[index].keys = cache.keys[index].data_ptr()
            layers[index].values = cache.values[index].data_ptr()
        dim = cache.keys.shape[-1]
        self._hidden = config.hidden_size
        self._shape = structs.Shape(
            len(layers), self._hidden, config.num_attention_heads, cache.keys.shape[2], dim,
            config.intermediate_size, cache.places, config.rms_norm_eps, dim**-0.5,
            WEIGHT_DTYPES[self._head.packed.dtype], DTYPES[norm.dtype], DTYPES[cache.keys.dtype], 1,
        )  # fmt: skip
        places = torch.arange(cache.places)
        cos, sin = decoder.rotary_emb(torch.empty(1, 1, 1, dtype=torch.float32), places[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()  # [places, dim]
        self._taps, self._tap_layers = taps, torch.tensor(taps, dtype=torch.int32)
        self._model = structs.Model(
            ctypes.addressof(layers), embedding.data_ptr(), norm.data_ptr(), self._head.native,
            self._tap_layers.data_ptr(), len(taps), window_of(config) or 0, DTYPES[embedding.dtype],
        )  # fmt: skip
        self._alive = (layers, model, cache)

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """Run ``layers`` in one call of the kernels, in float32, see ``Decoder.forward``."""
        return self._run(rows, wanted, layers, states, None)

    def run_to_exit(
        self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, exit_rule: ExitRule
    ) -> PartialForward:
        """Run ``forward`` up to the first exit where a row leaves."""
        exits = torch.tensor(exit_rule.exits, dtype=torch.int32)
        left = torch.empty(len(rows.token_ids), dtype=torch.int32)
        parts = (exits, exit_rule.controllers.contiguous(), exit_rule.owners, exit_rule.above, left)
        native = structs.NativeExitRule(*(part.data_ptr() for part in parts), len(exits), 0)
        forward = self._run(rows, wanted, layers, states, native)
        return PartialForward(forward, native.stop, left.nonzero().flatten().tolist())

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values of ``layers`` in one call of the kernels, see ``Decoder.fill``."""
        states = states.float().contiguous()
        self._shape.threads = torch.get_num_threads()
        places = structs.Rows(rows, self._cos, self._sin)
        call_kernel(
            "osd_fill", "no memory for the scratch space of a forward",
            ctypes.byref(self._model), ctypes.byref(self._shape), ctypes.byref(places), states.data_ptr(),
            layers.start, layers.stop,
        )  # fmt: skip

    def _run(
        self,
        rows: PackedRows,
        wanted: Tensor,
        layers: range,
        states: Tensor | None,
        exit_rule: structs.NativeExitRule | None,
    ) -> Forward:
        count = len(rows.token_ids)
        logits = recycled((len(wanted), self._head.out_features), torch.float32)
        tapped = torch.empty(count, len(self._taps), self._hidden)
        before = None if states is None else states.float().contiguous()
        early = exit_rule is not None or layers.stop < self._shape.layers
        after = torch.empty(count, self._hidden) if early else None
        self._shape.threads = torch.get_num_threads()
        places = structs.Rows(rows, self._cos, self._sin)
        call = structs.ForwardCall(
            rows.token_ids.data_ptr(), wanted.data_ptr(), logits.data_ptr(), tapped.data_ptr(), len(wanted),
            None if before is None else before.data_ptr(), None if after is None else after.data_ptr(),
            layers.start, layers.stop, None if exit_rule is None else ctypes.addressof(exit_rule),
        )  # fmt: skip
        call_kernel(
            "osd_forward", "no memory for the scratch space of a forward",
            ctypes.byref(self._model), ctypes.byref(self._shape), ctypes.byref(places), ctypes.byref(call),
        )  # fmt: skip
        if exit_rule is not None:
            layers = range(layers.start, exit_rule.stop)
        if layers.stop == self._shape.layers:
            after = None
        else:
            logits = logits[:0]
        passed = [at for at, tap in enumerate(self._taps) if tap in layers]
        if len(passed) < len(self._taps):
            tapped = tapped[:, passed]
        return Forward(logits, tapped.flatten(1) if passed else None, after)
