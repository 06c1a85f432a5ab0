"""What runs a model's decoder layers over KV slots: one interface, and what a forward gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from osd.runtime.batch import PackedRows


@dataclass(frozen=True)
class Forward:
    """What a forward of R rows computed.

    ``logits`` [n, vocab] float32 of the n rows wanted, of none where it stopped before the last layer; ``hidden``
    [R, taps * hidden] of those taps that it passed, None for none; ``states`` [R, hidden] after the last of its layers
    where it stopped early: what a forward that starts there reads. Of rows that ``left`` early, behind so many
    layers, there are no logits, and what stands in their place means nothing.
    """

    logits: Tensor
    hidden: Tensor | None
    states: Tensor | None = None
    left: Mapping[int, int] = field(default_factory=dict)

    def map(self, rows: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor]) -> Forward:
        """The same with ``rows`` of what has R rows, and ``wanted`` of the logits."""
        hidden, states = (None if part is None else rows(part) for part in (self.hidden, self.states))
        return replace(self, logits=wanted(self.logits), hidden=hidden, states=states)


class Decoder(Protocol):
    """A model over KV slots."""

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """Run ``layers`` of the model, where ``rows`` and ``wanted`` [n] are on its device already.

        ``states`` [R, hidden] are those before the first of the layers; None where that is the model's first, which
        reads token ids. Nothing is wanted where it stops early.
        """
        ...

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values of ``rows`` in ``layers`` as each would make them of ``states`` [R, hidden]."""
        ...


def joined(outputs: dict[int, Tensor], taps: tuple[int, ...], layers: range) -> Tensor | None:
    """The ``outputs`` [R, hidden] of those ``taps`` that are among ``layers``, side by side; None for none."""
    passed = [outputs[tap] for tap in taps if tap in layers]
    return torch.cat(passed, -1) if passed else None


def llama_shaped(model: nn.Module) -> bool:
    """Whether every layer of ``model`` is of the one kind that ``FusedDecoder`` and ``LeanDecoder`` write down."""
    config: Any = model.config
    return (
        type(model).__name__ in ("LlamaForCausalLM", "LlamaWeights", "MistralForCausalLM", "Qwen2ForCausalLM")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and len(set(getattr(config, "layer_types", None) or ["full_attention"])) == 1
        and fixed_angles(config)
    )


def fixed_angles(config: Any) -> bool:
    """Whether the rotary embedding turns a place by the same angles however long the text is."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers may have one entry for each.
    every = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return all(part.get("rope_type", "default") not in ("dynamic", "longrope") for part in every)


def recordable(config: Any) -> bool:
    """Whether a model's forward never asks its device for a value: routing to experts does, and so do moving angles."""
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return fixed_angles(config) and not experts


def window_of(config: Any) -> int | None:
    """How many places a row sees where every layer slides."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or set(kinds) == {"sliding_attention"}:
        return getattr(config, "sliding_window", None)
    return None
