"""A head that judges from a drafter's state whether the token that it has just read will be accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import OPTIONAL, split
from osd.drafting.shapes import check_flags
from osd.runtime.linear import PackedLinear, fused_dtype
from osd.runtime.native import kernels, structs

CONFIG = "acceptance_head"
"""Field of ``config.json`` that is true for a drafter with a head."""

_BLOCKS = 3


class AcceptanceHead(nn.Module):
    """Three residual blocks ``x + SiLU(W x + b)`` over the normalised state, then the log-odds of acceptance.

    A new head is all zeros: every token is accepted with probability 1/2, as without a head.

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
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs))
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class SessionHead:
    """The acceptance head of a session, on its device."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Take the head's tensors out of the ``weights`` of a version."""
        self._head = AcceptanceHead(weights[f"{OPTIONAL}odds.weight"].shape[1]).to(device)
        self.device = device
        self.load(weights)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], device: torch.device) -> Self | None:
        """The head of a version; None where it has none."""
        return cls(weights, device) if any(name.startswith(OPTIONAL) for name in weights) else None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Judge by other ``weights`` from now on."""
        self._head.load_state_dict(split(OPTIONAL, weights)[1])
        self._packed: tuple[list[PackedLinear], Tensor] | None = None  # until chains ask for it

    @torch.inference_mode()
    def acceptance(self, states: Tensor) -> Tensor:
        """[M] the probabilities of acceptance from states [M, width]."""
        return self._head(states).sigmoid()

    def until(self, most: float) -> structs.Judge | None:
        """Return the head for our kernels: chains end where a token is rejected more probably than ``most``.

        It points into this object, and is None where the kernels do not run.
        """
        if kernels() is None or self.device.type != "cpu":
            return None
        odds = self._head.odds
        if self._packed is None:
            dtype, layers = fused_dtype(self.device), cast("list[nn.Linear]", list(self._head.blocks))
            packed = [PackedLinear(layer.weight.to(dtype), layer.bias) for layer in layers]
            self._packed = packed, odds.weight.detach().flatten().clone()
        blocks = [block.native for block in self._packed[0]]
        native = (structs.Linear * len(blocks))(*blocks)
        return structs.Judge(native, self._packed[1].data_ptr(), odds.bias.item(), most)


def has_head(config: dict[str, Any]) -> bool:
    """Whether ``config`` is of a drafter with a head."""
    has: bool = config.get(CONFIG, False)
    check_flags(**{CONFIG: has})
    return has


def without_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without the head."""
    return {name: value for name, value in config.items() if name != CONFIG}
