"""A draft model of transformers from what a version says of it."""

from __future__ import annotations

from typing import Any, cast

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from osd.drafters.base import DrafterError
from osd.drafters.shapes import check_heads, check_sizes
from osd.runtime.causal_lm import attention_of, text_config

_LONGEST = 200
"""Characters of what another library says of a configuration."""

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MOST_LAYERS = 1024


def model_of(config: Any) -> nn.Module:
    """The model, untrained, that ``config`` describes as ``PretrainedConfig.to_dict`` does.

    Raises:
        DrafterError: it describes none.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise DrafterError(f"model.model_type is {kind!r}, which transformers does not have")
    for name in _SIZES:
        if name in config:
            most = {"most": _MOST_LAYERS} if name == "num_hidden_layers" else {}
            check_sizes(**most, **{f"model.{name}": config[name]})
    try:
        made = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    except Exception as error:  # each of its models checks its own sizes, in its own way
        said = " ".join(str(error).split())
        said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
        raise DrafterError(f"model describes none that transformers can make: {said}") from None
    sizes = attention_of(cast(nn.Module, model))
    check_heads(sizes["heads"], sizes["kv_heads"])
    check_sizes(**{"model.vocab_size": text_config(model).vocab_size})
    return model
