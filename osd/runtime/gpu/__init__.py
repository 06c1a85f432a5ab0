"""Kernels for GPUs, in Triton, which PyTorch brings along there; everything has a PyTorch fallback."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


def launch(name: str, grid: tuple[int, ...], *given: object, **options: int) -> None:
    """Run the kernel ``name`` once for each place of ``grid``; ``options`` are those that Triton has for all."""
    kernel: Any = getattr(import_module("osd.runtime.gpu.kernels"), name)
    kernel[grid](*given, **options)
