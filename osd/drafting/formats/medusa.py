"""Medusa's heads in the layout of FasterDecoding/Medusa: ``medusa_lm_head.safetensors`` and ``config.json``.

``0.0.linear.weight`` is the residual block of the first head, and ``0.1.weight`` its output head. All output heads
equal the target's. It is written once for vLLM, which does not use the target's; other readers do. The draft vocabulary
is stored as ``d2t`` and ``t2d``. Other readers ignore these tensors and draft any id. Pickled weights are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from osd.config import MedusaSettings
from osd.drafting.formats.base import CONFIG, ExportOrigin, Format, FormatError
from osd.drafting.medusa import Medusa
from osd.drafting.trainable import Trainable
from osd.registry import layouts
from osd.target.model import load_part

_MAPS = ("d2t", "t2d")
_HEAD = "0.1.weight"


class MedusaHeads(Format):
    """One residual block for each head, under the target's own head."""

    kind, weights = Medusa.kind, "medusa_lm_head.safetensors"

    def write(self, drafter: Medusa, origin: ExportOrigin, folder: Path) -> None:
        head = drafter.target_head
        vllm = {
            "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": head.shape[1],
            "vocab_size": head.shape[0], "medusa_fc_bias": True, "original_lm_head": True,
        }  # fmt: skip
        config = {"medusa_num_heads": drafter.levels, "medusa_num_layers": 1, "base_model_name_or_path": origin.name}
        self.save(folder, config | vllm, layouts.medusa(drafter.config(), drafter.weights()) | {_HEAD: head})

    def in_vllm(self, drafter: Medusa, depth: int) -> dict[str, Any]:
        """Return vLLM's ``--speculative-config`` without ``model``; always with one token per head."""
        return {"method": "medusa", "num_speculative_tokens": drafter.levels}

    def recognises(self, config: dict[str, Any]) -> bool:
        return "medusa_num_heads" in config

    def read(self, folder: Path, config: dict[str, Any], target: Path) -> Trainable:
        """Return the drafter, see ``Format.read``; a missing vocabulary gets the size of a new drafter's."""
        heads, layers = config["medusa_num_heads"], config.get("medusa_num_layers", 1)
        if not isinstance(heads, int) or heads < 1:
            raise FormatError(f"{folder / CONFIG}: medusa_num_heads must be at least 1, not {heads}")
        if layers != 1:
            raise FormatError(f"{folder / CONFIG}: medusa_num_layers must be 1, not {layers}")
        tensors = self.tensors(folder)
        vocabulary = len(tensors["d2t"]) if "d2t" in tensors else MedusaSettings().vocabulary
        drafter = Medusa(load_part(target), heads, vocabulary)
        maps = {name: value for name, value in drafter.weights().items() if name in _MAPS}
        drafter.load_weights(maps | _ours(tensors, heads, drafter.target_head, folder / self.weights))
        return drafter


def _ours(tensors: dict[str, Tensor], heads: int, target_head: Tensor, file: Path) -> dict[str, Tensor]:
    """Return the tensors by our names; unknown tensors keep their names, so that the check refuses them."""
    left = dict(tensors)
    parts: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for head in range(heads):
        output = left.pop(f"{head}.1.weight", None)
        if output is not None and not torch.equal(output.to(target_head.dtype), target_head):
            raise FormatError(f"{file}: {head}.1.weight must equal the target's head")
        for name, blocks in parts.items():
            tensor = left.pop(f"{head}.0.linear.{name}", None)
            if tensor is None or (blocks and tensor.shape != blocks[0].shape):
                problem = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, unlike head 0"
                raise FormatError(f"{file}: {head}.0.linear.{name} {problem}")
            blocks.append(tensor.float())
    return {name: torch.stack(blocks) for name, blocks in parts.items()} | left
