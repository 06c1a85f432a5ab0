"""Memory: of large tensors of a round, used again in the next, and of tensors that take it as they are written."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes below which the allocator keeps memory itself

PAGE = mmap.PAGESIZE
"""Bytes of a small page."""

free: deque[np.ndarray] = deque()
"""Blocks that no tensor uses now."""


def recycled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor that is not initialised, in memory that an earlier one gave back.

    PyTorch returns large blocks to the system on a CPU, and the system clears each page before it gives it out again:
    that takes longer than a softmax written to it. The memory comes back here when the last tensor that shares it is
    gone, so that as much is held as one round needs.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    block = _take(size)
    part = block[:size]  # an object of its own, which lives as long as the storage that is made of it
    weakref.finalize(part, free.append, block).atexit = False
    return torch.from_numpy(part).view(dtype).view(shape)


def give_back() -> None:
    """Let the system have what was freed and the allocator holds: loading a model leaves tens of megabytes of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others do it by themselves
    if trim is not None:
        trim(0)


def _take(size: int) -> np.ndarray:
    """The smallest free block that is large enough; when there is none, those that are too small are let go."""
    found: list[np.ndarray] = []
    for _ in range(len(free)):
        try:  # another thread may be faster
            found.append(free.popleft())
        except IndexError:
            break
    fitting = [block for block in found if block.size >= size]
    best = min(fitting, key=lambda block: block.size, default=None)
    free.extend(block for block in fitting if block is not best)
    return np.empty(size, np.uint8) if best is None else best


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
