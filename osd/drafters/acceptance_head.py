"""The head that judges from a drafter's state whether the token that it has just read will be accepted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PREFIX = "acceptance."
"""Of the names that a head's tensors have in a drafter version."""

_CONFIG = "acceptance_head"
_BLOCKS = 3


class AcceptanceHead(nn.Module):
    """Three residual blocks ``x + SiLU(W x + b)`` over the normalised state, then the log-odds of acceptance.

    A new head is all zeros: every token is accepted with probability 1/2. The same is said where there is none, so
    that the growth policy ``acceptance_head`` means something from the first request on, and what learns starts there.

    Huang, Guo and Wang, "SpecDec++: boosting speculative decoding via adaptive candidate lengths", COLM 2025 (arXiv
    2405.19715).
    """

    def __init__(self, width: int) -> None:
        """Make a new head over states of ``width`` numbers."""
        super().__init__()
        self.blocks = nn.ModuleList(_zeros(width, width) for _ in range(_BLOCKS))
        self.odds = _zeros(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds [...] of acceptance from states [..., width] of any size: only their direction is read."""
        x = F.rms_norm(states.float(), states.shape[-1:])
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.odds(x).squeeze(-1)


def _zeros(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer  # type: ignore[return-value]


def judged(head: AcceptanceHead | None, states: Tensor) -> Tensor:
    """[M] probability of acceptance from ``states`` [M, width]."""
    return states.new_full((len(states),), 0.5, dtype=torch.float32) if head is None else head(states).sigmoid()


def fitted(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """A version's weights with a head exactly where ``expected`` has one.

    A version from before there was one gets zeros, which say 1/2; a head that nobody asks is left out. So any version
    of a domain can come back into service.
    """
    mine = {name for name in weights if name.startswith(PREFIX)}
    theirs = {name for name in expected if name.startswith(PREFIX)}
    if mine and not theirs:
        return {name: value for name, value in weights.items() if name not in mine}
    if theirs and not mine:
        return {**weights, **{name: torch.zeros_like(expected[name]) for name in theirs}}
    return weights


def head_config(head: AcceptanceHead | None) -> dict[str, Any]:
    """What ``config.json`` of a version says of its head: nothing when there is none."""
    return {} if head is None else {_CONFIG: True}


def has_head(config: dict[str, Any]) -> bool:
    """Whether ``config`` is of a drafter with a head."""
    return bool(config.get(_CONFIG))


def without_head(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` of the same drafter without a head."""
    return {name: value for name, value in config.items() if name != _CONFIG}
