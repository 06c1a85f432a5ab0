"""Falcon's first weights: what it reads passes through, and the layer behind it is the target's last one."""

from __future__ import annotations

import torch
from torch import nn

from osd.drafters.eagle.initial import LAST_LAYER
from osd.runtime.causal_lm import text_config

_OPEN = 2.0  # log-odds of the gates: they let most of what is read through


@torch.no_grad()
def fill(weights: dict[str, nn.Parameter], target: nn.Module, size: float) -> None:
    """Fill the parameters of a new drafter from what is there of the target.

    Features pass through the recurrent part and leave it as large as they are in the target, of ``size_of_hidden``,
    so that the layer behind it, a copy of the target's last one where the shapes agree, starts on the numbers that it
    knows.
    """
    state, layers = target.state_dict(), text_config(target).num_hidden_layers
    hidden = len(weights["attention_norm.weight"])
    for number, scale in enumerate((1.0, size)):
        gate, candidate = weights[f"recurrent.{number}.weight"].split(hidden)
        gate.mul_(0.1)
        candidate.mul_(0.1)
        candidate[:, -hidden:] += torch.eye(hidden)
        candidate.mul_(scale)
        weights[f"recurrent.{number}.bias"][:hidden].fill_(_OPEN)
        weights[f"recurrent.{number}.bias"][hidden:].zero_()
    last = f"layers.{layers - 1}."
    for mine, theirs in LAST_LAYER.items():
        weight = weights[mine.replace("feature_norm", "attention_norm")]
        for name, value in state.items():
            if name.endswith(last + theirs) and value.shape == weight.shape:
                weight.copy_(value)
