"""Checks of a target's architecture before its weights are loaded.

The engine keeps the keys and values of each token in slots, cut into rows of several sequences. It cannot run layers
with another state, or attention that does not go through the interface of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from osd.runtime.decoder import fixed_up_to
from osd.target.files import TargetError, one_line, quantisation
from osd.target.llama import read_config
from osd.target.model import auto_config, on_meta

_LAYERS = {"full_attention", "sliding_attention"}


def check_architecture(directory: Path, source: str) -> None:
    """Check that the engine can run the model of a directory; ``source`` is its name in messages.

    Raises:
        TargetError: it cannot; the message names the reason.
    """
    if read_config(directory) is not None:
        return
    name, reason = _obstacle(directory)
    if reason:
        raise TargetError(f"target.source: {source} is a {name}, which osd does not support: {reason}")


def is_supported(directory: Path) -> bool:
    """Return whether our engine can run the model of a directory: the weights are plain, and the layers are known."""
    if read_config(directory) is not None:
        return True
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return not quantisation(fields) and not _obstacle(directory)[1]


def check_context(directory: Path, context: int) -> None:
    """Check that rotary angles do not depend on the length of a text of up to ``context`` tokens.

    Raises:
        TargetError: they do beyond a shorter length.
    """
    if read_config(directory) is not None:
        return
    kind, longest = fixed_up_to(auto_config(directory).get_text_config())
    if longest is not None and context > longest:
        raise TargetError(
            f"engine.context is {context}, and the rotary angles ({kind}) of this model change for texts of more than "
            f"{longest} tokens: set it to {longest} or less"
        )


def _obstacle(directory: Path) -> tuple[str, str]:
    """Return the name of the architecture, and why it cannot run; an empty reason if it can."""
    try:
        config = auto_config(directory)
    except (OSError, ValueError, KeyError) as error:
        return "model of unknown kind", one_line(error)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYERS
    if kinds:
        return text.model_type, f"it has layers of kind {', '.join(sorted(kinds))}"
    if getattr(text, "kv_lora_rank", None):
        return text.model_type, "its attention keeps latent keys and values (MLA)"
    try:
        model: Any = on_meta(config)
    except Exception as error:  # models of a library that is missing, or of a configuration that is incomplete
        return text.model_type, one_line(error)
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        return name, "its layers keep further state in addition to keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        return name, "its attention does not go through the interface of transformers"
    if any(part.rpartition(".")[2] == "sinks" for part, _ in model.named_parameters()):
        return name, "its attention has sinks"
    return name, ""
