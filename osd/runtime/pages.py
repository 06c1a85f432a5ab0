"""Memory that a tensor takes as it is written, and that the system can have back."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
"""Bytes of a small page."""


class Pages:
    """A ``tensor`` of zeros.

    On a CPU it takes no memory until it is written: PyTorch would write it, the system gives zeros for nothing. It
    comes in large pages, which are quick to find, unless somebody wants to give it back. On another device it takes all
    of its memory from the start.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._map: mmap.mmap | None = None
        if device.type == "cpu":
            size, own = max(1, math.prod(shape) * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, size, flags=own)
            self._advise("MADV_HUGEPAGE")
            self.tensor = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def in_small_pages(self) -> None:
        """Have memory come in pages of ``PAGE`` bytes from now on, of which ``release`` gives back each that it can."""
        self._advise("MADV_NOHUGEPAGE")

    def _advise(self, advice: str) -> None:
        if self._map is not None and (number := getattr(mmap, advice, None)) is not None:
            with suppress(OSError):  # a system without large pages
                self._map.madvise(number)

    def release(self, part: Tensor) -> None:
        """Give back whatever whole pages a contiguous ``part`` of the tensor has; these are zeros again."""
        if self._map is None:
            return
        start = part.data_ptr() - self.tensor.data_ptr()
        begin, end = -(-start // PAGE) * PAGE, (start + part.numel() * part.itemsize) // PAGE * PAGE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
