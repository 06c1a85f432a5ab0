"""Triton kernels for GPUs, each with a PyTorch fallback; Triton is part of PyTorch's GPU builds."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether ``device`` is a CUDA device and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def launch(name: str, grid: tuple[int, ...], *given: object, **options: int) -> None:
    """Run the kernel ``name`` for each place of ``grid``; ``options`` are Triton's launch options."""
    kernel: Any = getattr(import_module("osd.runtime.gpu.kernels"), name)
    kernel[grid](*given, **options)
