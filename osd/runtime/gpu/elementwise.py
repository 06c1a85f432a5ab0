"""Operations of a layer between its matrix products, each a single kernel on a GPU.

On a GPU such a kernel takes some microseconds even for little work, so their number matters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.batch import power_of_two
from osd.runtime.gpu import has_kernels, launch

_BLOCK = 1024
"""Values of a row that one program of ``gate`` computes."""


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x`` [R, hidden] plus ``added``, which may be None, and its RMS norm (Zhang and Sennrich, 2019)."""
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
    """Return SiLU of the first half of ``both`` [R, 2 width] times the second half (Shazeer, 2020)."""
    if not has_kernels(both.device):
        first, second = both.chunk(2, -1)
        return F.silu(first) * second
    rows, width = len(both), both.shape[1] // 2
    result = both.new_empty(rows, width)
    launch("gate", (rows, -(-width // _BLOCK)), both, result, width, _BLOCK)
    return result


class Rotation:
    """Rotary embedding (Su et al., 2021) at the positions of some rows."""

    def __init__(self, cosines: Tensor, sines: Tensor, positions: Tensor) -> None:
        """Use tables [places, dim] at ``positions`` [R]; the first half of ``sines`` is negative."""
        self._cosines, self._sines, self._positions = cosines, sines, positions
        if not has_kernels(positions.device):
            self._cosines, self._sines = (table[positions].unsqueeze(1) for table in (cosines, sines))  # [R, 1, dim]

    def turn(self, parts: Tensor) -> Tensor:
        """Return the rotated heads [R, heads, dim]; this may overwrite ``parts``.

        The two halves of dim are the axes of the planes.
        """
        rows, heads, dim = parts.shape
        if not has_kernels(parts.device):  # swap the halves
            return torch.addcmul(parts * self._cosines, parts.roll(dim // 2, -1), self._sines)
        given = (parts, parts.stride(0), self._positions, self._cosines, self._sines)
        launch("rotate", (rows, heads), *given, dim // 2, num_warps=1)
        return parts
