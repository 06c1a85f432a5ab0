"""Any decoder-only model of transformers over KV slots, through transformers' own code.

Its attention is registered with transformers: a model that calls it through ``AttentionInterface`` and hands on
unknown keyword arguments can run here. What a forward needs arrives as the keyword ``osd_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from osd.runtime import attention
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache
from osd.runtime.taps import tapped

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
    """Attend [1, heads, R, dim] queries over their slots; transformers' attention signature.

    Returns:
        [1, R, heads, dim] and no attention weights.

    Raises:
        NotImplementedError: the model wants attention sinks, which the slots do not have.
    """
    if osd_attention is None:
        raise NotImplementedError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("models with attention sinks are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # [1, heads, R, dim] -> [R, heads, dim]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = osd_attention.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap or 0.0)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, slot_attention)


class GenericDecoder:
    """A model over the slots of ``cache`` that runs as transformers wrote it."""

    def __init__(self, model: nn.Module, cache: KVCache, taps: tuple[int, ...]) -> None:
        """Make ``model`` attend over slots."""
        model.config.get_text_config()._attn_implementation = NAME  # type: ignore[union-attr, operator]
        self._model, self._cache, self._taps = model, cache, taps

    def forward(self, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [n, vocab] float32 of rows ``wanted`` [n] and tapped hidden states [R, taps * hidden]."""
        with tapped(self._model, self._taps) as outputs:
            output = self._model(
                input_ids=rows.token_ids.unsqueeze(0),
                position_ids=rows.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=wanted,
                osd_attention=attention.prepare(rows, self._cache),
            )
        hidden = torch.cat([outputs[tap][0] for tap in self._taps], -1) if self._taps else None
        return output.logits[0].float(), hidden
