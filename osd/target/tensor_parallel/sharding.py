"""Shard of a model for one of several processes, loaded without reading the rest of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from osd.runtime.causal_lm import decoder_layers, decoder_of, ends_of, text_config
from osd.runtime.decoder import llama_shaped
from osd.runtime.generic import NAME
from osd.runtime.kv_cache import heads_of
from osd.target.files import TargetError
from osd.target.llama import generation_config
from osd.target.model import DTYPES, auto_config, on_meta

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")

Cut = Callable[[Any], Tensor]
"""Function that takes a part of a weight, given a tensor or a safetensors slice."""


class RowParallelLinear(nn.Linear):
    """Linear layer with a part of the inputs per process, summed over processes: [..., in / size] -> [..., out]."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product summed over all processes; only the first process has the bias."""
        y = super().forward(input)
        dist.all_reduce(y)
        return y


class VocabularyParallelHead(nn.Linear):
    """Head with a part of the vocabulary per process: [..., hidden] -> [..., vocabulary], gathered in each process."""

    def __init__(self, hidden: int, vocabulary: int, size: int, dtype: torch.dtype) -> None:
        """Create an equal number of rows in each of ``size`` processes; the last process may pad."""
        super().__init__(hidden, -(-vocabulary // size), bias=False, dtype=dtype)
        self._vocabulary, self._size = vocabulary, size

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, gathered from all processes."""
        part = super().forward(input)
        parts = part.new_empty(self._size, *part.shape)
        dist.all_gather(list(parts.unbind(0)), part)
        return parts.movedim(0, -2).flatten(-2)[..., : self._vocabulary]


def check_sizes(model: nn.Module, size: int) -> None:
    """Check that ``model``, which may be on the meta device, can be divided among ``size`` processes.

    Raises:
        TargetError: its layers are not Llama-shaped, or a size is not divisible.
    """
    config, setting = text_config(model), f"target.tensor_parallel is {size}"
    if not llama_shaped(model):
        raise TargetError(f"{setting}, which needs a Llama-shaped target, and the target is {type(model).__name__}")
    numbers = {
        "query heads": config.num_attention_heads,
        "key heads": heads_of(config)[0],
        "columns in its MLP": config.intermediate_size,
    }
    for name, count in numbers.items():
        if count % size:
            raise TargetError(f"{setting}, and the target has {count} {name}, which that does not divide")


def load_shard(directory: Path, dtype: str, device: torch.device, rank: int, size: int) -> nn.Module:
    """Load the shard of process ``rank`` of ``size``, ready for ``SlotModel``.

    Its configuration states the reduced number of heads. The embedding is whole.

    Raises:
        TargetError: the model cannot be divided, or a weight is missing.
    """
    model = _skeleton(directory, dtype)
    check_sizes(model, size)
    config = text_config(model)
    rotary, made_with = type(decoder_of(model).rotary_emb), auto_config(directory).get_text_config()
    cuts = _divide(model, rank, size)
    heads, dim = heads_of(config)
    config.num_attention_heads, config.num_key_value_heads = config.num_attention_heads // size, heads // size
    config.head_dim = dim
    model.to_empty(device=device)
    decoder_of(model).rotary_emb = rotary(config=made_with).to(device)
    _read(directory, model, cuts)
    return model.requires_grad_(False)


def _skeleton(directory: Path, dtype: str) -> nn.Module:
    """Return the whole model without weights."""
    config = auto_config(directory).get_text_config()
    model = on_meta(config, dtype=DTYPES[dtype], attn_implementation=NAME)
    model.generation_config = generation_config(directory, config)
    return model


def check_divisible(directory: Path, size: int) -> None:
    """Check that the model in a directory can be divided among ``size`` processes, without loading its weights.

    Raises:
        TargetError: see ``check_sizes``.
    """
    check_sizes(_skeleton(directory, "bfloat16"), size)


def _divide(model: nn.Module, rank: int, size: int) -> dict[str, Cut]:
    """Replace layers by layers that hold a part; return the cut of each weight by name."""
    cuts: dict[str, Cut] = {}
    names = {module: name for name, module in model.named_modules()}
    for layer in decoder_layers(model):
        for path in (*_COLUMNS, *_ROWS):
            parent, _, name = path.rpartition(".")
            whole: Any = layer.get_submodule(path)
            by_rows = path in _ROWS
            inputs, outputs = whole.in_features, whole.out_features
            inputs, outputs = (inputs // size, outputs) if by_rows else (inputs, outputs // size)
            kind = RowParallelLinear if by_rows else nn.Linear
            part = kind(inputs, outputs, whole.bias is not None, device="meta", dtype=whole.weight.dtype)
            setattr(layer.get_submodule(parent), name, part)
            cut = _inputs(rank * inputs, inputs) if by_rows else _outputs(rank * outputs, outputs)
            cuts[f"{names[whole]}.weight"] = cut
            if whole.bias is not None:
                cuts[f"{names[whole]}.bias"] = _outputs(0, outputs if rank == 0 else 0) if by_rows else cut
    head: Any = ends_of(model)[1]
    with torch.device("meta"):
        part = VocabularyParallelHead(head.in_features, head.out_features, size, head.weight.dtype)
    model.lm_head = part
    cuts["lm_head.weight"] = _outputs(rank * part.out_features, part.out_features)
    return cuts


def _outputs(start: int, count: int) -> Cut:
    return lambda weight: weight[start : start + count]


def _inputs(start: int, count: int) -> Cut:
    return lambda weight: weight[:, start : start + count]


def _read(directory: Path, model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Load the model's weights from the files, of each only the needed part."""
    wanted = dict(model.named_parameters())
    if text_config(model).tie_word_embeddings:
        embedding = next(name for name, weight in wanted.items() if weight is ends_of(model)[0].weight)
        source = {name: embedding if name == "lm_head.weight" else name for name in wanted}
    else:
        source = {name: name for name in wanted}
    missing = set(wanted)
    with torch.no_grad():
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                here = set(file.keys())
                for name in sorted(name for name in missing if source[name] in here):
                    part = cuts.get(name, lambda weight: weight[:])(file.get_slice(source[name]))
                    wanted[name][: len(part)].copy_(part)
                    wanted[name][len(part) :].zero_()
                    missing.discard(name)
    if missing:
        raise TargetError(f"target.source: {directory} holds no weight {min(missing)}")
