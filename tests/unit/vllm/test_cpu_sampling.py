"""Correction of vLLM's sampling on CPUs, with fake modules of vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from osd.vllm.cpu_sampling import correct_sampling, expand

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


@pytest.mark.parametrize(
    ("values", "replaced", "expected"),
    [([0.7, 0.0, 1.2], (0, 1), [0.7, 0.7, 1.2, 1.2, 1.2]), ([5, 9, 3], (3, 8), [5, 5, 8, 8, 8])],
)
def test_each_drafted_position_gets_the_value_of_its_request(values, replaced, expected):
    values = torch.tensor(values)
    output = values.new_full((5,), 99)
    expand(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), *replaced, MAX_NUM_TOKENS=8)
    assert torch.equal(output, values.new_tensor(expected))


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("is_registered", [True, False])
def test_kernel_is_replaced_on_cpus_only(monkeypatch, is_cpu, is_registered):
    registered: dict = {KERNEL: None} if is_registered else {}
    kernels = SimpleNamespace(_expand_kernel_impl=None)
    dispatcher = SimpleNamespace(_registry=registered, register_kernels=registered.update)
    modules = {
        "vllm": SimpleNamespace(),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: is_cpu)),
        "vllm.triton_utils": SimpleNamespace(dispatcher=dispatcher),
        "vllm.utils": SimpleNamespace(cpu_triton_utils=kernels),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    correct_sampling()
    assert kernels._expand_kernel_impl is (expand if is_cpu else None)
    assert registered == ({KERNEL: expand if is_cpu else None} if is_registered else {})


def test_nothing_happens_without_vllm():
    assert "vllm" not in sys.modules
    correct_sampling()
