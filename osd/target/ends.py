"""Embedding and head of a target, which drafters share; they are also read from targets that only vLLM can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from osd.target.architecture import is_supported
from osd.target.files import TargetError, one_line
from osd.target.filling import read_shapes, read_tensors
from osd.target.model import auto_config, load_part

_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
"""Sizes of a target from which the sizes of a drafter follow."""

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_HEADS = ("lm_head", "embed_out", "output")
"""Names of the modules in the files of models, without the names of the modules around them."""

_ADVICE = "set drafter.kind=none to serve it without drafts"


class TargetEnds(nn.Module):
    """Embedding and head of a target, without layers and without a forward pass.

    Attributes:
        config: configuration of the language part.
    """

    def __init__(self, config: Any, embedding: Tensor, head: Tensor) -> None:
        """Wrap the weights ``embedding`` and ``head``, both [vocabulary, hidden]."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding.from_pretrained(embedding)
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        self.head.weight = nn.Parameter(head, requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the module with the embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the module with the head."""
        return self.head


def load_ends(directory: Path) -> nn.Module:
    """Return the model of a directory with its embedding and head only, in the dtype of the file.

    Raises:
        TargetError: see ``read_ends``.
    """
    return load_part(directory) if is_supported(directory) else read_ends(directory)


def read_ends(directory: Path) -> TargetEnds:
    """Return embedding and head by the usual names of their weights, for layers of any kind.

    Raises:
        TargetError: the files have no such weight, or more than one; or see ``check_sizes``.
    """
    config = check_sizes(directory)
    shapes = read_shapes(directory)
    shape = [config.vocab_size, config.hidden_size]

    def names_of(modules: tuple[str, ...]) -> list[str]:
        ends = {f"{module}.weight" for module in modules}
        fitting = [name for name, size in shapes.items() if size == shape]
        return [name for name in fitting if ".".join(name.split(".")[-2:]) in ends]

    embeddings, heads = names_of(_EMBEDDINGS), names_of(_HEADS)
    if len(embeddings) != 1:
        raise TargetError(f"target.source: {directory} has {_found(embeddings)} embedding of {shape}: {_ADVICE}")
    if not heads and any(getattr(part, "tie_word_embeddings", False) for part in (config, auto_config(directory))):
        heads = embeddings
    if len(heads) != 1:
        raise TargetError(f"target.source: {directory} has {_found(heads)} head of {shape}: {_ADVICE}")
    weights = read_tensors(directory, {*embeddings, *heads})
    return TargetEnds(config, weights[embeddings[0]], weights[heads[0]])


def check_sizes(directory: Path) -> Any:
    """Return the configuration of a target's language part, with all sizes that a drafter needs.

    Raises:
        TargetError: transformers does not know the model, or its configuration lacks a size.
    """
    try:
        config = auto_config(directory).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = f"transformers cannot read config.json of {directory}, and a drafter needs its sizes"
        raise TargetError(f"target.source: {reason} ({one_line(error)}): {_ADVICE}") from None
    if missing := [name for name in _SIZES if type(getattr(config, name, None)) is not int]:
        reason = f"config.json of {directory} has no {', '.join(missing)}, and a drafter needs it"
        raise TargetError(f"target.source: {reason}: {_ADVICE}")
    return config


def _found(names: list[str]) -> str:
    return "more than one" if names else "no"
