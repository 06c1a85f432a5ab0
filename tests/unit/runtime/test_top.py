from __future__ import annotations

import math

import pytest
import torch

from osd.runtime import top as module
from osd.runtime.native import kernels
from osd.runtime.top import Top, most_probable
from tests.device import forbid_device_waits

needs_kernels = pytest.mark.skipif(kernels() is None, reason="the kernels were not built, or this CPU has no AVX2")


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    if request.param == "kernel" and kernels() is None:
        pytest.skip("the kernels were not built, or this CPU has no AVX2")
    if request.param == "torch":
        monkeypatch.setattr(module, "readable", lambda logits: False)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocabulary", [5, 63, 64, 65, 200, 8192, 49_152])
@pytest.mark.parametrize("k", [1, 32, 300])
def test_top_equals_log_softmax_and_topk(way, vocabulary, k):
    logits, rows = random(6, vocabulary), [4, 0, 5, 4]
    result = most_probable(logits, rows, k)
    logp = logits[rows].double().log_softmax(-1)
    best = logp.topk(min(k, vocabulary), -1)
    assert result.ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(result.logp.double(), best.values, rtol=1e-6, atol=2e-6)
    rest = 1 - best.values.exp().sum(-1)
    torch.testing.assert_close(result.tail.double().exp(), rest.clamp(min=1e-12), rtol=1e-4, atol=3e-6)


def test_top_numbers_rows_over_leading_axes_and_maps_ids(way):
    logits = random(3, 4, 100)
    support = torch.arange(1000, 1100)
    result = most_probable(logits, [2 * 4 + 1], 3, support)
    assert result.ids[0].tolist() == (1000 + logits[2, 1].topk(3).indices).tolist()


@pytest.mark.parametrize("logits", [random(4, 300)[1:, 20:250], random(3, 200).double()], ids=["slice", "float64"])
def test_top_reads_tensors_of_any_strides_and_dtype(way, logits):
    result = most_probable(logits, [2, 0], 4)
    assert result.ids.tolist() == logits[[2, 0]].topk(4).indices.tolist()


def test_top_lists_equal_and_impossible_tokens_once(way):
    logits = torch.full((1, 500), -math.inf)
    logits[0, [3, 70, 499]] = 2.0
    result = most_probable(logits, [0], 5)
    assert set(result.ids[0, :3].tolist()) == {3, 70, 499}
    assert len(set(result.ids[0].tolist())) == 5
    torch.testing.assert_close(result.logp[0, :3], torch.full((3,), -math.log(3)))
    assert result.logp[0, 3:].tolist() == [-math.inf, -math.inf]
    assert result.tail.exp() < 1e-6


def test_top_of_nan_logits_is_not_finite(way):
    logits = random(1, 200)
    logits[0, 150] = math.nan
    assert not torch.isfinite(most_probable(logits, [0], 8).logp).all()


def test_top_of_no_rows_is_empty(way):
    result = most_probable(random(2, 100), [], 8)
    assert (result.ids.shape, result.logp.shape, result.tail.shape) == ((0, 8), (0, 8), (0,))


@needs_kernels
def test_top_of_float32_uses_the_kernel(monkeypatch):
    monkeypatch.setattr(module, "reference", None)
    most_probable(random(2, 100), [1], 8)


def test_arriving_top_equals_the_original():
    result = most_probable(random(4, 65), range(4), 7)
    here = Top(*result.arriving().wait())
    assert all(torch.equal(getattr(here, name), getattr(result, name)) for name in ("ids", "logp", "tail"))
    assert result.on_host().ids is result.ids  # no copy on a CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_arriving_on_gpu_does_not_wait():
    logits = random(4, 65).cuda()
    torch.cuda.synchronize()
    with forbid_device_waits():
        arriving = most_probable(logits, range(4), 7).arriving()
        logits.zero_()  # later changes do not affect the copies
    assert torch.equal(arriving.wait()[0], most_probable(random(4, 65), range(4), 7).ids)
