"""Llama-shaped models in one call of our kernels, without an operator call between one weight and the next.

Llama, Mistral and Qwen2 share one layer: RMS norms, rotary embedding, grouped heads, SwiGLU. Any other
model runs through transformers' own code on ``slot_attention``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osd.native import DTYPES, kernels
from osd.native.structs import Layer, Rows, Shape
from osd.target.kv_cache import KVCache, PackedRows
from osd.target.linear import PackedLinear

FUSABLE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})


def fusable(model: nn.Module) -> bool:
    """Whether ``FusedDecoder`` computes what ``model`` does, on this machine."""
    config: Any = model.config
    return (
        type(model).__name__ in FUSABLE
        and kernels() is not None
        and next(model.parameters()).device.type == "cpu"
        and next(model.parameters()).dtype in DTYPES
        and config.hidden_act == "silu"
        and (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) % 8 == 0
        and not getattr(config, "mlp_bias", False)
        and len(set(getattr(config, "layer_types", None) or ["full_attention"])) == 1
    )


@dataclass(frozen=True)
class FusedDecoder:
    """The decoder of a ``fusable`` model whose linear layers are ``PackedLinear``; shares all its weights."""

    model: nn.Module
    cache: KVCache
    layers: Any
    shape: Shape
    window: int | None
    taps: Tensor

    @classmethod
    def of(cls, model: nn.Module, cache: KVCache, taps: tuple[int, ...]) -> FusedDecoder:
        """Point at the weights of ``model`` and the slots of ``cache``; neither may be reallocated afterwards."""
        config: Any = model.config
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        layers = (Layer * len(decoder.layers))()
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
        shape = Shape(
            len(layers), config.hidden_size, config.num_attention_heads, cache.keys.shape[2], dim,
            config.intermediate_size, cache.places, config.rms_norm_eps, dim**-0.5,
            DTYPES[decoder.layers[0].self_attn.q_proj.packed.dtype], DTYPES[decoder.norm.weight.dtype],
            DTYPES[cache.keys.dtype], 1,
        )  # fmt: skip
        sliding = set(getattr(config, "layer_types", None) or ()) == {"sliding_attention"} or (
            getattr(config, "layer_types", None) is None
        )
        window = getattr(config, "sliding_window", None) if sliding else None
        return cls(model, cache, layers, shape, window, torch.tensor(taps, dtype=torch.int32))

    def forward(self, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, vocab] float32 of rows ``wanted`` [n] and tapped hidden states [R, taps * hidden] float32."""
        library = kernels()
        assert library is not None  # noqa: S101
        decoder: Any = self.model.get_decoder()  # type: ignore[operator]
        x = decoder.embed_tokens(rows.token_ids).float()  # [R, hidden]
        cos, sin = (part[0] for part in decoder.rotary_emb(x, rows.positions[None]))
        start = None
        if self.window is not None:
            start = (rows.positions.to(torch.int32) - (self.window - 1)).clamp_min(0)
        tapped = x.new_empty(len(x), len(self.taps) * x.shape[1])
        self.shape.threads = torch.get_num_threads()
        failed = library.osd_decoder(
            ctypes.byref(self.layers),
            ctypes.byref(self.shape),
            ctypes.byref(Rows(rows, cos, sin, start)),
            x.data_ptr(),
            self.taps.data_ptr(),
            len(self.taps),
            tapped.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for a forward's scratch space")
        last = nn.functional.rms_norm(x[wanted], x.shape[-1:], decoder.norm.weight.float(), self.shape.eps)
        return self.model.get_output_embeddings()(last), tapped  # type: ignore[operator]
