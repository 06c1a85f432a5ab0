"""What a layer does between its matrix products, each of it one kernel on a GPU.

There such a kernel takes some microseconds however little it does, so that their number counts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.batch import power_of_two
from osd.runtime.gpu import has_kernels, launch

_BLOCK = 1024
"""Values of a row that one program gates."""


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` [R, hidden] + ``added``, if there is something, and the RMS norm of it (Zhang and Sennrich, 2019)."""
    if not has_kernels(x.device):
        x = x if added is None else x + added
        return x, F.rms_norm(x, x.shape[-1:], weight, eps)
    x = x.contiguous()
    rows, width = x.shape
    total, normed = x if added is None else torch.empty_like(x), torch.empty_like(x)
    given = (x, x if added is None else added, weight, total, normed, eps, width, added is not None)
    launch("add_norm", (rows,), *given, power_of_two(width), num_warps=8)
    return total, normed


def gate(both: Tensor) -> Tensor:
    """SiLU of the first half of ``both`` [R, 2 width] times the second (Shazeer, 2020)."""
    if not has_kernels(both.device):
        first, second = both.chunk(2, -1)
        return F.silu(first) * second
    rows, width = len(both), both.shape[1] // 2
    result = both.new_empty(rows, width)
    launch("gate", (rows, -(-width // _BLOCK)), both, result, width, _BLOCK)
    return result


class Rotation:
    """The rotary embedding (Su et al., 2021) at the positions of some rows."""

    def __init__(self, cosines: Tensor, sines: Tensor, positions: Tensor) -> None:
        """Turn rows at ``positions`` [R] by tables [places, dim]; the first half of ``sines`` is negative."""
        self._cosines, self._sines, self._positions = cosines, sines, positions
        if not has_kernels(positions.device):
            self._cosines, self._sines = (table[positions].unsqueeze(1) for table in (cosines, sines))  # [R, 1, dim]

    def turn(self, parts: Tensor) -> Tensor:
        """Heads [R, heads, dim], turned; it may overwrite ``parts``. The two halves of dim are the planes' axes."""
        rows, heads, dim = parts.shape
        if not has_kernels(parts.device):  # one half goes to the other's place
            return torch.addcmul(parts * self._cosines, parts.roll(dim // 2, -1), self._sines)
        given = (parts, parts.stride(0), self._positions, self._cosines, self._sines)
        launch("rotate", (rows, heads), *given, dim // 2, num_warps=1)
        return parts
