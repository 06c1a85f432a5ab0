"""EAGLE-3 drafters in the format of the speculators library, which ``vllm serve <dir>`` loads without flags.

Names and meanings are those of ``Eagle3SpeculatorConfig`` and its model (vllm-project/speculators): ``fc`` fuses the
tapped states, and ``layers.0`` is the decoder layer with ``input_layernorm`` for the token's embedding and
``hidden_norm`` for the feature. ``norm`` and ``lm_head`` give the logits of the draft vocabulary, which ``d2t`` and
``t2d`` map. An id k in ``eagle_aux_hidden_state_layer_ids`` is the input of the target's layer k, which is the output
of layer k - 1.

Heads in the layout of the EAGLE authors and of SpecForge are read too: one flat ``config.json``, and ``midlayer`` for
``layers.0``.

Our layer is EAGLE-3 with ``fc_norm`` (EAGLE 3.1's norm of each tapped state) and is written exactly. The other norms of
the format are read exactly too, but have no native kernels. The target's embedding is omitted, which the format allows:
readers use the target's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from osd.drafting.eagle.drafter import Eagle
from osd.drafting.formats.base import CONFIG, WEIGHTS, ExportOrigin, Format, FormatError, read_json
from osd.drafting.shapes import EagleShape
from osd.drafting.trainable import Trainable
from osd.registry import layouts
from osd.target.model import load_config

_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
"""Required fields of the decoder layer."""

_EMBEDDING = "embed_tokens.weight"

_AUTHORS = "LlamaForCausalLMEagle3"
"""Architecture of heads by the EAGLE authors and by SpecForge."""


class Speculators(Format):
    """EAGLE-3 as one Llama layer."""

    kind, weights = Eagle.kind, WEIGHTS

    def write(self, drafter: Eagle, origin: ExportOrigin, folder: Path) -> None:
        shape, architectures = drafter.shape, read_json(origin.target / CONFIG).get("architectures") or []
        greedy = {"proposal_type": "greedy", "speculative_tokens": origin.depth}
        greedy |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [greedy],
                "verifier": {"name_or_path": origin.name, "architectures": architectures},
            },
            "transformer_layer_config": _layer_config(shape, load_config(origin.target)),
            "draft_vocab_size": shape.vocabulary,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
            "fc_norm": shape.tap_norm == "each",
            "norm_before_fc": shape.tap_norm == "joint",
            "norm_before_residual": shape.residual_norm,
            "norm_output": shape.output_norm,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": str(drafter.fuse.weight.dtype).removeprefix("torch."),
        }
        self.save(folder, config, layouts.eagle(drafter.config(), drafter.weights()))

    def in_vllm(self, drafter: Eagle, depth: int) -> dict[str, Any]:
        if (taps := drafter.shape.taps) != tuple(sorted(set(taps))):
            raise FormatError(
                f"vLLM cannot load this drafter: it reads the target's layers {taps}, and vLLM gives the states of "
                "each layer once, in ascending order; train a drafter whose layers are in this order"
            )
        return {"method": "eagle3", "num_speculative_tokens": depth}

    def recognises(self, config: dict[str, Any]) -> bool:
        return "speculators_model_type" in config or config.get("architectures") == [_AUTHORS]

    def read(self, folder: Path, config: dict[str, Any], target: Path) -> Trainable:
        of_target = load_config(target)
        try:
            shape = _shape(_wrapped(config), of_target.num_hidden_layers)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{folder / CONFIG}: {_reason(error)}") from None
        sizes = {"hidden_size": shape.hidden, "vocab_size": shape.target_vocabulary}
        for name, size in sizes.items():
            if size != (expected := getattr(of_target, name)):
                raise FormatError(f"{folder / CONFIG}: {name} is {size}, but the target's is {expected}")
        drafter = Eagle.from_config({"kind": Eagle.kind, **vars(shape)}, target)
        drafter.load_weights(_ours(self.tensors(folder), shape, drafter.embedding, folder))
        return drafter


def _layer_config(shape: EagleShape, target: Any) -> dict[str, Any]:
    layer = transformers.LlamaConfig(
        **{name: value for name, value in _LAYER.items() if name != "model_type"},
        vocab_size=shape.target_vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=getattr(target, "max_position_embeddings", 2048),
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta, **(shape.rope_scaling or {})},
        tie_word_embeddings=False,
        bos_token_id=getattr(target, "bos_token_id", None),
        eos_token_id=getattr(target, "eos_token_id", None),
        pad_token_id=None,
    )
    # Older readers need the old name of the base of the rotation.
    return {**layer.to_dict(), "model_type": "llama", "rope_theta": shape.rope_theta}


def _wrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` of the EAGLE authors or of SpecForge with the fields of the speculators library.

    Its layer ids are those of outputs of the target's layers.
    """
    if "speculators_model_type" in config:
        return config
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": ids and [id + 1 for id in ids],
    }


def _shape(config: dict[str, Any], target_layers: int) -> EagleShape:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise FormatError(f"speculators_model_type must be eagle3, not {kind}")
    layer = config["transformer_layer_config"]
    for name, needed in _LAYER.items():
        if layer.get(name, needed) != needed:
            raise FormatError(f"transformer_layer_config.{name} must be {needed}, not {layer[name]}")
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    if config.get("target_hidden_size") not in (None, hidden):
        raise FormatError(f"target_hidden_size must be hidden_size {hidden}, not {config['target_hidden_size']}")
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {name: value for name, value in rope.items() if name not in ("type", "rope_theta")} | {"rope_type": kind}
    each, joint = bool(config.get("fc_norm")), bool(config.get("norm_before_fc"))
    if each and joint:
        raise FormatError("fc_norm and norm_before_fc exclude each other")
    ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, target_layers // 2, target_layers - 3]
    if not all(isinstance(id, int) and 1 <= id <= target_layers for id in ids):
        raise FormatError(f"eagle_aux_hidden_state_layer_ids must be from 1 to the target's {target_layers}, not {ids}")
    return EagleShape(
        hidden=hidden,
        heads=heads,
        kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        intermediate=layer["intermediate_size"],
        target_vocabulary=layer["vocab_size"],
        vocabulary=config["draft_vocab_size"],
        taps=tuple(id - 1 for id in ids),
        eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0),
        rope_scaling=None if kind == "default" else scaling,
        tap_norm="each" if each else "joint" if joint else "none",
        residual_norm=bool(config.get("norm_before_residual")),
        output_norm=bool(config.get("norm_output")),
    )


def _ours(tensors: dict[str, Tensor], shape: EagleShape, embedding: Tensor, folder: Path) -> dict[str, Tensor]:
    """Return the tensors by our names; unknown tensors keep their names, so that the check refuses them."""
    left = {
        re.sub(r"^midlayer\.", "layers.0.", name): value
        for name, value in tensors.items()
        if not name.startswith("verifier_")
    }
    stored = left.pop(_EMBEDDING, None)
    if stored is not None and not torch.equal(stored.to(embedding.dtype), embedding):
        raise FormatError(f"{folder / WEIGHTS}: {_EMBEDDING} must equal the target's")
    weights = {ours: left.pop(theirs) for ours, theirs in layouts.EAGLE.items() if theirs in left}
    weights = {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    if shape.vocabulary == shape.target_vocabulary:
        weights.setdefault("t2d", torch.ones(shape.vocabulary, dtype=torch.bool))
        weights.setdefault("d2t", torch.zeros(shape.vocabulary, dtype=torch.int64))
    norms = [f"fc_norm.{i}.weight" for i in range(len(shape.taps))]
    if shape.tap_norm == "each" and all(name in left for name in norms):
        weights["tap_norm"] = torch.stack([left.pop(name).float() for name in norms])
    elif shape.tap_norm == "joint" and "input_norm.weight" in left:
        weights["tap_norm"] = left.pop("input_norm.weight").float().unflatten(0, (len(shape.taps), -1))
    elif shape.tap_norm == "none":
        weights["tap_norm"] = torch.ones(len(shape.taps), shape.hidden)
    return {**weights, **left}


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
