from __future__ import annotations

import math

import pytest
import torch

from osd.runtime import top as module
from osd.runtime.native import kernels
from osd.runtime.top import Top, top
from tests.device import nothing_may_wait

needs_kernels = pytest.mark.skipif(kernels() is None, reason="the kernels were not built, or this CPU has no AVX2")


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    if request.param == "kernel" and kernels() is None:
        pytest.skip("the kernels were not built, or this CPU has no AVX2")
    if request.param == "torch":
        monkeypatch.setattr(module, "kernels", lambda: None)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocabulary", [5, 63, 64, 65, 200, 8192, 49_152])
@pytest.mark.parametrize("k", [1, 32, 300])
def test_the_most_probable_tokens_and_the_mass_of_the_others(way, vocabulary, k):
    logits, rows = random(6, vocabulary), [4, 0, 5, 4]
    found = top(logits, rows, k)
    logp = logits[rows].double().log_softmax(-1)
    best = logp.topk(min(k, vocabulary), -1)
    assert found.ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(found.logp.double(), best.values, rtol=1e-6, atol=2e-6)
    rest = 1 - best.values.exp().sum(-1)
    torch.testing.assert_close(found.tail.double().exp(), rest.clamp(min=1e-12), rtol=1e-4, atol=3e-6)


def test_rows_count_through_all_leading_axes_and_columns_may_stand_for_other_ids(way):
    logits = random(3, 4, 100)
    support = torch.arange(1000, 1100)
    found = top(logits, [2 * 4 + 1], 3, support)
    assert found.ids[0].tolist() == (1000 + logits[2, 1].topk(3).indices).tolist()


def test_a_part_of_a_tensor_is_read_at_its_own_places(way):
    logits = random(4, 300)[1:, 20:250]
    found = top(logits, [2, 0], 4)
    assert found.ids.tolist() == logits[[2, 0]].topk(4).indices.tolist()


def test_logits_of_another_precision_are_not_read_as_float32(way):
    logits = random(3, 200).double()
    found = top(logits, [2, 0], 4)
    assert found.ids.tolist() == logits[[2, 0]].topk(4).indices.tolist()


def test_equal_and_impossible_tokens_are_kept_once_each(way):
    logits = torch.full((1, 500), -math.inf)
    logits[0, [3, 70, 499]] = 2.0
    found = top(logits, [0], 5)
    assert set(found.ids[0, :3].tolist()) == {3, 70, 499}
    assert len(set(found.ids[0].tolist())) == 5
    torch.testing.assert_close(found.logp[0, :3], torch.full((3,), -math.log(3)))
    assert found.logp[0, 3:].tolist() == [-math.inf, -math.inf]
    assert found.tail.exp() < 1e-6


def test_what_is_no_distribution_is_not_made_one(way):
    logits = random(1, 200)
    logits[0, 150] = math.nan
    assert not torch.isfinite(top(logits, [0], 8).logp).all()


def test_no_rows_give_nothing(way):
    found = top(random(2, 100), [], 8)
    assert (found.ids.shape, found.logp.shape, found.tail.shape) == ((0, 8), (0, 8), (0,))


@needs_kernels
def test_the_kernel_is_what_runs(monkeypatch):
    monkeypatch.setattr(module, "reference", None)
    top(random(2, 100), [1], 8)


def test_what_is_on_its_way_to_the_host_is_what_was_sent():
    found = top(random(4, 65), range(4), 7)
    here = Top(*found.arriving().here())
    assert all(torch.equal(getattr(here, name), getattr(found, name)) for name in ("ids", "logp", "tail"))
    assert found.on_host().ids is found.ids  # on a CPU nothing is copied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_until_they_are_asked_for():
    logits = random(4, 65).cuda()
    torch.cuda.synchronize()
    with nothing_may_wait():
        arriving = top(logits, range(4), 7).arriving()
        logits.zero_()  # what follows does not change what was sent
    assert torch.equal(arriving.here()[0], top(random(4, 65), range(4), 7).ids)
