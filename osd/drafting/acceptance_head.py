"""Head on a drafter's state that predicts whether the target accepts the token that the drafter has just read."""

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
"""Field of ``config.json``, true for a drafter with a head."""

_BLOCKS = 3


class AcceptanceHead(nn.Module):
    """Three residual blocks ``x + SiLU(W x + b)`` over the normalised state, then the log-odds of acceptance.

    A new head is zero and gives every token probability 1/2.

    Huang, Guo and Wang, "SpecDec++: boosting speculative decoding via adaptive candidate lengths", COLM 2025 (arXiv
    2405.19715).
    """

    def __init__(self, width: int) -> None:
        """Make a new head over states of ``width`` numbers."""
        super().__init__()
        self.blocks = nn.ModuleList(_zeros(width, width) for _ in range(_BLOCKS))
        self.odds = _zeros(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Return the log-odds [...] of acceptance for states [..., width]; their scale has no influence."""
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
    """Acceptance head of a session, on its device."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Make the head with its tensors in the ``weights`` of a version."""
        self._head = AcceptanceHead(weights[f"{OPTIONAL}odds.weight"].shape[1]).to(device)
        self.device = device
        self.load(weights)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], device: torch.device) -> Self | None:
        """Return the head of a version, None if it has none."""
        return cls(weights, device) if any(name.startswith(OPTIONAL) for name in weights) else None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Switch to the ``weights`` of another version."""
        self._head.load_state_dict(split(OPTIONAL, weights)[1])
        self._packed: tuple[list[PackedLinear], Tensor] | None = None  # packed on first use

    @torch.inference_mode()
    def acceptance(self, states: Tensor) -> Tensor:
        """Return the probabilities of acceptance [M] for states [M, width]."""
        return self._head(states).sigmoid()

    def until(self, most: float) -> structs.Judge | None:
        """Return the head for our kernels, which end chains at a probability of rejection above ``most``.

        The result points into this object. It is None if the kernels do not run.
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
    """Return whether ``config`` describes a drafter with a head."""
    has: bool = config.get(CONFIG, False)
    check_flags(**{CONFIG: has})
    return has


def without_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without the field of the head."""
    return {name: value for name, value in config.items() if name != CONFIG}
