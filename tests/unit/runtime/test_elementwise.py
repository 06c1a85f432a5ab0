"""Elementwise operations of a layer: the GPU kernels compared with PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from osd.runtime.gpu.elementwise import Rotation, add_norm, gate
from tests.device import DEVICE
from tests.unit.runtime.on_gpu import with_kernels

DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(got: Tensor, goal: Tensor) -> None:
    tolerance = 1e-5 if goal.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, goal, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 2048])
def test_add_norm_kernel_equals_pytorch(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, added, weight = (drawn(*shape, dtype=dtype) for shape in ((5, width), (5, width), (width,)))
    summed, alone = add_norm(x, added, weight, 1e-5), add_norm(x, None, weight, 1e-5)
    with_kernels(monkeypatch)
    for got, goal in ((add_norm(x, added, weight, 1e-5), summed), (add_norm(x, None, weight, 1e-5), alone)):
        close(got[0], goal[0])
        close(got[1], goal[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_gate_kernel_equals_pytorch(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    both = drawn(3, 2 * width, dtype=dtype)
    goal = gate(both)
    with_kernels(monkeypatch)
    close(gate(both), goal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_kernel_turns_only_its_heads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, positions = drawn(5, 6, 16, dtype=dtype), torch.tensor([3, 1, 39, 0, 7], device=DEVICE)
    angles = drawn(40, 16, dtype=torch.float32)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    goal, behind = Rotation(cosines, sines, positions).turn(parts[:, :4]), parts[:, 4:].clone()
    with_kernels(monkeypatch)
    close(Rotation(cosines, sines, positions).turn(parts[:, :4]), goal)
    assert torch.equal(parts[:, 4:], behind)
