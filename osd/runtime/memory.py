"""Memory for the large tensors of a round, used again in the next, and memory that nobody uses."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes below which the allocator keeps memory itself

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
