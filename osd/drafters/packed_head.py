"""An acceptance head for our kernels, which draft whole chains without asking anybody between two tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from osd.runtime.linear import PackedLinear, fused_dtype
from osd.runtime.native import structs


class PackedHead:
    """The weights of an ``AcceptanceHead`` as they are when it is made, in the dtype in which a CPU multiplies them."""

    def __init__(self, blocks: Iterable[nn.Module], odds: nn.Linear) -> None:
        """Pack its ``blocks``, and copy what makes ``odds`` of their output."""
        dtype = fused_dtype(torch.device("cpu"))
        self._blocks = [PackedLinear(block.weight.to(dtype), block.bias) for block in cast(Iterable[nn.Linear], blocks)]
        self._odds, self._bias = odds.weight.detach().float().flatten().clone(), odds.bias.item()

    def until(self, most: float) -> structs.Judge:
        """For chains that end where a token is rejected more probably than ``most``; this object is to stay alive."""
        blocks = [block.native for block in self._blocks]
        return structs.Judge((structs.Linear * len(blocks))(*blocks), self._odds.data_ptr(), self._bias, most)
