"""The kernels for GPUs: where the tests have no GPU, Triton's interpreter runs them on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.device import DEVICE

pytest.importorskip("triton")


def cannot_multiply(dtype: torch.dtype) -> bool:
    """Whether Triton's interpreter has no products of this dtype, and there is nothing else."""
    return DEVICE.type == "cpu" and dtype == torch.bfloat16


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them run wherever they could on a GPU."""
    for user in ("osd.runtime.gpu.elementwise", "osd.runtime.attention.flash_decoding"):
        monkeypatch.setattr(f"{user}.has_kernels", lambda device: True)
