"""Interface of a model's decoder layers over KV slots, and the result of a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from osd.runtime.batch import PackedRows


@dataclass(frozen=True)
class Forward:
    """Result of a forward of R rows.

    Attributes:
        logits: [n, vocab] float32 of the n wanted rows; [0, vocab] if the forward stopped before the last layer.
        hidden: [R, taps * hidden] of the taps among its layers, None for none.
        states: [R, hidden] after its last layer if it stopped early; the input of a forward that starts there.
        left: number of layers behind which each row left early. Such rows have no logits; the values in their place are
            meaningless.
    """

    logits: Tensor
    hidden: Tensor | None
    states: Tensor | None = None
    left: Mapping[int, int] = field(default_factory=dict)

    def map(self, rows: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor]) -> Forward:
        """Return a copy with ``rows`` applied to the tensors of R rows, and ``wanted`` to the logits."""
        hidden, states = (None if part is None else rows(part) for part in (self.hidden, self.states))
        return replace(self, logits=wanted(self.logits), hidden=hidden, states=states)


class Decoder(Protocol):
    """Model over KV slots."""

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """Run ``layers`` of the model; ``rows`` and ``wanted`` [n] are on its device.

        ``states`` [R, hidden] are the input of the first of the layers; None if that is the model's first layer, which
        reads token ids. ``wanted`` is empty if the forward stops early.
        """
        ...

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values that each of ``layers`` computes from ``states`` [R, hidden] for ``rows``."""
        ...


def joined(outputs: dict[int, Tensor], taps: tuple[int, ...], layers: range) -> Tensor | None:
    """Return the ``outputs`` [R, hidden] of the ``taps`` among ``layers``, concatenated; None for none."""
    passed = [outputs[tap] for tap in taps if tap in layers]
    return torch.cat(passed, -1) if passed else None


def llama_shaped(model: nn.Module) -> bool:
    """Return whether each layer of ``model`` is of the kind that ``FusedDecoder`` and ``LeanDecoder`` implement."""
    config: Any = model.config
    return (
        type(model).__name__ in ("LlamaForCausalLM", "LlamaWeights", "MistralForCausalLM", "Qwen2ForCausalLM")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and len(set(getattr(config, "layer_types", None) or ["full_attention"])) == 1
        and fixed_angles(config)
    )


def fixed_angles(config: Any) -> bool:
    """Return whether the rotary embedding turns a place by the same angles for any length of text."""
    return fixed_up_to(config)[1] is None


def fixed_up_to(config: Any) -> tuple[str, int | None]:
    """Return the kind of rotary embedding, and the longest text with fixed angles; None if the length never matters."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers may have an entry for each kind.
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = part.get("rope_type", "default")
        if kind == "dynamic":
            return kind, config.max_position_embeddings
        if kind == "longrope":
            trained_on = part.get("original_max_position_embeddings")
            trained_on = trained_on or getattr(config, "original_max_position_embeddings", None)
            return kind, trained_on or config.max_position_embeddings
    return rope.get("rope_type", "default"), None


def recordable(config: Any) -> bool:
    """Return whether a model's forward reads no values from its device; expert routing and dynamic angles do."""
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return fixed_angles(config) and not experts


def window_of(config: Any) -> int | None:
    """Return the number of places that a row sees if each layer has a sliding window, else None."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or set(kinds) == {"sliding_attention"}:
        return getattr(config, "sliding_window", None)
    return None
