"""GPU kernels in tests: without a GPU, Triton's interpreter runs them on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from osd.runtime.gpu import launch
from tests.device import DEVICE

pytest.importorskip("triton")


def cannot_multiply(dtype: torch.dtype) -> bool:
    """Return whether Triton's interpreter has no products of this dtype and there is no GPU."""
    return DEVICE.type == "cpu" and dtype == torch.bfloat16


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Use the GPU kernels wherever a GPU would, and count the launches of each."""
    launched: Counter[str] = Counter()

    def counted(name: str, *given: Any, **options: int) -> None:
        launched[name] += 1
        launch(name, *given, **options)

    for user in ("osd.runtime.gpu.elementwise", "osd.runtime.attention.flash_decoding"):
        monkeypatch.setattr(f"{user}.has_kernels", lambda device: True)
        monkeypatch.setattr(f"{user}.launch", counted)
    return launched
