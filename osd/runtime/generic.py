"""Decoder of any decoder-only model of transformers over KV slots, with the model's own code.

Its attention is registered with transformers: a model that calls it through ``AttentionInterface`` and passes unknown
keyword arguments on can run here. The backend of a forward arrives as the keyword ``osd_attention``.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from osd.runtime import attention
from osd.runtime.batch import PackedRows, consecutive_rows
from osd.runtime.causal_lm import decoder_layers, text_config
from osd.runtime.decoder import Forward, joined
from osd.runtime.kv_cache import KVCache
from osd.runtime.taps import run_each, run_only, tapped

NAME = "osd_slots"


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    osd_attention: attention.AttentionBackend | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend over slots with transformers' signature.

    Args:
        module: the attention module, with its ``layer_idx``.
        query: [1, heads, R, dim].
        key: [1, kv_heads, R, dim].
        value: [1, kv_heads, R, dim].
        attention_mask: unused.
        scaling: factor of the scores, by default ``dim ** -0.5``.
        sliding_window: number of visible places, None for all.
        softcap: limit of the scores, None for no limit.
        osd_attention: backend of this forward.
        **kwargs: unused, except for ``s_aux``.

    Returns:
        [1, R, heads, dim], and None for the attention weights.

    Raises:
        NotImplementedError: the model passes no keyword arguments, or needs attention sinks, which slots do not have.
    """
    if osd_attention is None:
        raise NotImplementedError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("models with attention sinks are not supported")
    layer: Any = module.layer_idx
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # [1, heads, R, dim] -> [R, heads, dim]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = osd_attention.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap or 0.0)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, slot_attention)


class GenericDecoder:
    """Decoder that runs a model's own code over the slots of ``cache``."""

    def __init__(self, model: nn.Module, cache: KVCache, taps: tuple[int, ...]) -> None:
        """Make ``model`` attend over slots."""
        text_config(model)._attn_implementation = NAME
        self._model, self._cache, self._taps = model, cache, taps
        self._count = len(decoder_layers(model))

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """Run ``layers`` as ``Decoder.forward`` describes, with the first attention backend that supports ``rows``."""
        backend, early = attention.prepare(rows, self._cache), layers.stop < self._count
        taps = {tap for tap in self._taps if tap in layers} | ({layers.stop - 1} if early else set())
        reads = {"input_ids": rows.token_ids[None]} if states is None else {"inputs_embeds": self._embedded(states)}
        with ExitStack() as stack:
            if len(layers) < self._count:
                stack.enter_context(run_only(self._model, layers, self._tuples, reads.get("inputs_embeds")))
            outputs = stack.enter_context(tapped(self._model, taps))
            output = self._run(backend, rows.positions, wanted, **reads)
        passed = {layer: value[0] for layer, value in outputs.items()}
        after = passed[layers.stop - 1] if early else None
        return Forward(output.logits[0].float(), joined(passed, self._taps, layers), after)

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store keys and values of ``layers``, see ``Decoder.fill``; each layer is aborted when its keys are stored."""
        given = self._embedded(states)
        with run_each(self._model, layers, self._tuples, given, _Stored):
            self._run(_Storing(rows, self._cache), rows.positions, rows.positions[:0], inputs_embeds=given)

    def _embedded(self, states: Tensor) -> Tensor:
        return states[None].to(self._cache.keys.dtype)

    def _run(self, backend: attention.AttentionBackend, positions: Tensor, wanted: Tensor, **reads: Tensor) -> Any:
        return self._model(
            **reads, position_ids=positions[None], use_cache=False, logits_to_keep=wanted, osd_attention=backend
        )

    @cached_property
    def _tuples(self) -> bool:
        """Whether layers return tuples, tested by a forward that touches no slot."""
        rows = consecutive_rows(0, 0, [0])
        places = torch.zeros(1, dtype=torch.int64, device=self._cache.keys.device)
        is_tuple: list[bool] = []
        first = decoder_layers(self._model)[0]
        with first.register_forward_hook(lambda _module, _inputs, output: is_tuple.append(isinstance(output, tuple))):
            self._run(_Silent(rows, self._cache), places, places, input_ids=places[None])
        return is_tuple[0]


class _Stored(Exception):
    """Signal that a layer's keys are stored and the rest of the layer is not needed."""


class _Storing(attention.AttentionBackend):
    """Attention that stores keys and values and aborts the layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        self._cache.store(layer, self._rows.slots, self._rows.stores, key, value)
        raise _Stored


class _Silent(attention.AttentionBackend):
    """Attention that neither stores nor reads."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        return query
