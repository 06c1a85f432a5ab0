"""Memory of large tensors: blocks that are reused between decoding steps, and pages that are allocated when written."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes below which the allocator keeps freed memory itself

PAGE = mmap.PAGESIZE
"""Bytes of a small page."""

free: deque[np.ndarray] = deque()
"""Blocks that no tensor uses."""


def recycled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return an uninitialised tensor in the memory of an earlier one.

    On a CPU PyTorch returns large blocks to the system, which clears each page before it hands it out again. That takes
    longer than writing a softmax to it. A block becomes free when the last tensor that shares it is gone, so as much
    memory is held as one decoding step needs.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    block = _take(size)
    part = block[:size]  # a separate object that lives as long as the storage made of it
    weakref.finalize(part, free.append, block).atexit = False
    return torch.from_numpy(part).view(dtype).view(shape)


def _take(size: int) -> np.ndarray:
    """Return the smallest free block that is large enough; if there is none, drop the blocks that are too small."""
    blocks: list[np.ndarray] = []
    for _ in range(len(free)):
        try:  # another thread may take a block first
            blocks.append(free.popleft())
        except IndexError:
            break
    fitting = [block for block in blocks if block.size >= size]
    best = min(fitting, key=lambda block: block.size, default=None)
    free.extend(block for block in fitting if block is not best)
    return np.empty(size, np.uint8) if best is None else best


class Pages:
    """Memory of a ``tensor`` of zeros.

    On a CPU it takes no memory until it is written, because the system provides zero pages. It uses large pages, which
    are fast to look up, until ``in_small_pages``. On another device it takes all of its memory at once.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._map: mmap.mmap | None = None
        if device.type == "cpu":
            size = max(1, math.prod(shape) * dtype.itemsize)
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._advise("MADV_HUGEPAGE")
            self.tensor = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def in_small_pages(self) -> None:
        """Use pages of ``PAGE`` bytes from now on, so that ``release`` can release every whole page."""
        self._advise("MADV_NOHUGEPAGE")

    def _advise(self, advice: str) -> None:
        if self._map is not None and (number := getattr(mmap, advice, None)) is not None:
            with suppress(OSError):  # a system without large pages
                self._map.madvise(number)

    def release(self, part: Tensor) -> None:
        """Release the whole pages of a contiguous ``part`` of the tensor to the system; they become zeros."""
        if self._map is None:
            return
        start = part.data_ptr() - self.tensor.data_ptr()
        begin, end = -(-start // PAGE) * PAGE, (start + part.numel() * part.itemsize) // PAGE * PAGE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
