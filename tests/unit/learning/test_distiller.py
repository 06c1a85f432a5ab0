from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from osd.capture.trace import ACCEPTED, REJECTED, Array
from osd.config import TrainerSettings
from osd.drafting.base import DrafterError
from osd.learning import optimizer
from osd.learning.batch import collate
from osd.learning.distiller import Distiller, DistillerError
from osd.learning.divergences import DIVERGENCES, overlap
from osd.learning.evaluation import evaluate
from osd.learning.objective import DistillationObjective
from tests.unit.learning.toys import VOCABULARY, Toy, Watched, make_trace

HELD_OUT = [collate([make_trace(f"h{n}", completion=30, seed=1000 + n)]) for n in range(4)]


def settings(**changes):
    exact = {"precision": "float32"}  # on every CPU
    return TrainerSettings(**{"learning_rate": 0.03, "update_tokens": 1, **exact, **changes})


def batch(seed, completion=40, **changes):
    return collate([make_trace(f"t{seed}", completion=completion, seed=seed, **changes)])


def trained(steps, seed=0, start=0, distiller=None, **changes):
    torch.manual_seed(seed)
    distiller = distiller or Distiller(Toy(), settings(**changes))
    for n in range(start, start + steps):
        distiller.step(batch(n % 8, top_k=6))
    return distiller


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_training_raises_held_out_acceptance(divergence):
    before = evaluate(trained(0).drafter, HELD_OUT, 2, divergence)
    after = evaluate(trained(150, divergence=divergence).drafter, HELD_OUT, 2, divergence)
    print(before.summary(), after.summary())
    assert after.acceptance > before.acceptance + 0.2
    assert after.divergence < before.divergence / 2


class Perfect(Toy):
    """Drafter that equals the target at depth 0, and is uniform and untrainable at depth 1."""

    def unroll(self, batch, depth, drafted=None):
        good = torch.zeros(len(batch.place), VOCABULARY).scatter(1, batch.target_ids, batch.target_logp)
        return [good + 0 * self.read.weight.sum(), torch.zeros_like(good)]


def test_loss_is_the_weighted_sum_over_depths():
    data = batch(0, completion=20)
    log_p = data.target_logp
    uniform = (log_p.exp() * (log_p + torch.tensor(float(VOCABULARY)).log())).sum(1)
    step = Distiller(Perfect(), settings(unroll=2)).step(data)
    assert step.loss == pytest.approx(0.8 * uniform.mean().item(), rel=1e-3)


def test_length_weight_is_the_gradient_of_accepted_length():
    # The drafts have 204 tokens; the gradients of the first four are compared.
    rates = torch.tensor([0.7, 0.5, 0.9, 0.6], dtype=torch.float64).log().requires_grad_()
    deep = torch.cat([rates, rates[-1:].detach().expand(200)])
    deep.cumsum(0).exp().sum().backward()
    weights = [
        DistillationObjective.of(settings(depths="length"), 0, rates.exp().tolist()).share(depth) for depth in range(4)
    ]
    assert weights == pytest.approx((rates.grad / rates.grad[0]).tolist(), rel=1e-6)
    unknown, sure = (DistillationObjective.of(settings(depths="length"), 0, kept) for kept in ((), (1.0, 1.0)))
    assert [unknown.share(depth) for depth in range(3)] == pytest.approx([1, 0.8, 0.64])
    assert sure.share(0) == 1
    assert 0 < sure.share(5) < 1
    assert DistillationObjective.of(settings(depths="length"), 0, (0.0, 0.0)).share(0) == 1


def test_state_includes_acceptance_by_depth():
    data = batch(0, completion=20)
    distiller, again = (Distiller(Perfect(), settings(unroll=2, depths="length")) for _ in range(2))
    first = distiller.step(data)
    again.load_state_dict(*distiller.state_dict())
    assert again.step(data).loss < 0.9 * first.loss, "rarely reached depths have less weight"


def test_positions_without_a_depth_are_left_out():
    class Poisoned(Toy):
        def unroll(self, batch, depth, drafted=None):
            result = super().unroll(batch, depth)
            return [torch.where(batch.rows_at(d)[:, None], x, 1e9 * torch.ones_like(x)) for d, x in enumerate(result)]

    torch.manual_seed(0)
    clean, poisoned = Distiller(Toy(), settings()), Distiller(Poisoned(), settings())
    poisoned.drafter.load_weights(clean.drafter.weights())
    short = batch(0, completion=6, prompt=1)
    assert clean.step(short).loss == poisoned.step(short).loss
    first, second = (evaluate(d.drafter, [short], 3, "forward_kl") for d in (clean, poisoned))
    assert first.per_depth == second.per_depth
    assert first.divergence == second.divergence
    assert first.positions == 5


def test_step_with_nan_loss_is_skipped_and_counted():
    distiller = trained(3)
    before = {name: weight.clone() for name, weight in distiller.drafter.weights().items()}
    bad = batch(0)
    bad.hidden[0, 5] = float("nan")
    step = distiller.step(bad)
    assert step.skipped
    assert (distiller.steps, distiller.skipped) == (3, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in distiller.drafter.weights().items())
    assert not distiller.step(batch(1)).skipped


class Steep(Toy):
    """Drafter that adds the square root of 0, whose value is finite and whose gradient is not."""

    def unroll(self, batch, depth, drafted=None):
        return [x + (self.read.bias * 0).sqrt().sum() for x in super().unroll(batch, depth)]


def test_gathered_gradients_equal_those_of_one_batch():
    torch.manual_seed(0)
    whole, parts = Distiller(Toy(), settings(unroll=1)), Distiller(Toy(), settings(unroll=1, update_tokens=60))
    parts.drafter.load_weights(whole.drafter.weights())
    traces = [make_trace(f"t{n}", completion=20, seed=n) for n in range(3)]
    whole.step(collate(traces))
    before = parts.drafter.read.weight.clone()
    parts.step(collate(traces[:1]))
    assert torch.equal(parts.drafter.read.weight, before)
    assert parts.counts == (20, 0.0, 0)
    parts.step(collate(traces[1:]))
    assert parts.counts == (0, 0.0, 0)
    for name, weight in whole.drafter.weights().items():
        assert torch.allclose(parts.drafter.weights()[name], weight, atol=1e-5)
    assert parts.steps == 2


def test_state_includes_gathered_gradients():
    distiller = Distiller(Toy(), settings(update_tokens=10_000))
    before = distiller.drafter.read.weight.clone()
    distiller.step(batch(0))
    tensors, counters = distiller.state_dict()
    assert not torch.equal(tensors["drafter.read.weight"], before)
    assert counters["steps"] == 1


class Scaled(Toy):
    """Drafter whose gradients, but not its predictions, are multiplied by ``factor``."""

    factor = 1.0

    def unroll(self, batch, depth, drafted=None):
        return [x.detach() + self.factor * (x - x.detach()) for x in super().unroll(batch, depth)]


def test_gradient_spikes_are_skipped_until_the_scale_lasts():
    torch.manual_seed(0)
    distiller = Distiller(Scaled(), settings())
    for n in range(64):
        assert not distiller.step(batch(n % 8)).skipped
    before = distiller.drafter.read.weight.clone()
    distiller.drafter.factor = 1000.0
    assert distiller.step(batch(40)).skipped
    assert distiller.skipped == 1
    assert torch.equal(distiller.drafter.read.weight, before)
    distiller.drafter.factor = 1.0
    assert not distiller.step(batch(41)).skipped
    assert not torch.equal(distiller.drafter.read.weight, before)
    distiller.drafter.factor = 1000.0
    skipped = [distiller.step(batch(n % 8)).skipped for n in range(64)]
    assert all(skipped[:28])
    assert not any(skipped[40:])


def rejecting(*positions, completion=10):
    """Return a trace whose drafts were rejected at ``positions``."""
    verdict = np.full(completion, ACCEPTED, np.int8)
    verdict[list(positions)] = REJECTED
    return msgspec.structs.replace(make_trace("t", completion=completion, seed=1), verdict=Array.of(verdict))


def test_rejected_positions_have_the_configured_weight():
    torch.manual_seed(0)
    drafter = Toy()
    data = collate([rejecting(3)])
    logits = drafter.unroll(data, 1)[0]
    each = DIVERGENCES["forward_kl"](overlap(logits, data.target_ids, data.target_logp, data.target_tail, None))
    step = Distiller(drafter, settings(positions="weighted", rejected_weight=6.0, unroll=1)).step(data)
    assert step.loss == pytest.approx((each.sum() + 5 * each[3]).item() / 15, rel=1e-5)


@pytest.mark.parametrize(
    ("drafter", "positions", "data", "skipped"),
    [
        (Steep, "all", batch(0), 1),
        (Toy, "all", batch(0, prompt=1, completion=1), 0),
        (Toy, "rejected", collate([rejecting()]), 0),
    ],
    ids=["a gradient that is not finite", "no position to predict", "no rejection where only rejections count"],
)
def test_step_without_a_usable_gradient_changes_nothing(drafter, positions, data, skipped):
    distiller = Distiller(drafter(), settings(positions=positions))
    before = distiller.drafter.read.weight.clone()
    assert distiller.step(data).skipped
    assert distiller.skipped == skipped
    assert torch.equal(distiller.drafter.read.weight, before)


def test_gradients_are_clipped_by_their_global_norm():
    distiller = trained(0, learning_rate=1e-3)
    data = batch(0)
    data.target_logp *= 1000
    data.target_logp[:] = -1000.0
    data.target_logp[:, 0] = 0.0
    seen = []

    def record(*_):
        seen.extend(weight.grad.clone() for weight in distiller.drafter.parameters())

    with register_optimizer_step_pre_hook(record):
        distiller.step(data)
    assert torch.stack([gradient.norm() for gradient in seen]).norm().item() == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(("spoil", "error"), [
    (lambda t, c: t.update({"optimizer.exp_avg.other": torch.zeros(2)}), DistillerError),
    (lambda t, c: t.update({"optimizer.exp_avg.read.weight": torch.zeros(2)}), DistillerError),
    (lambda t, c: t["optimizer.exp_avg.read.weight"].fill_(float("nan")), DistillerError),
    (lambda t, c: t.pop("optimizer.exp_avg.read.weight"), DistillerError),
    (lambda t, c: c.pop("steps"), DistillerError),
    (lambda t, c: t.pop("drafter.read.weight"), DrafterError),
])  # fmt: skip
def test_mismatched_state_is_refused_without_changes(spoil, error):
    tensors, counters = trained(2).state_dict()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(tensors, counters)
    distiller = Distiller(Toy(), settings())
    before = distiller.drafter.read.weight.clone()
    with pytest.raises(error):
        distiller.load_state_dict(tensors, counters)
    assert torch.equal(distiller.drafter.read.weight, before)
    assert distiller.steps == 0


def test_small_vocabulary_drafter_is_trained():
    torch.manual_seed(0)
    drafter = Toy(draft_ids=torch.tensor([1, 2, 5, 7, 8, 11]))
    distiller = Distiller(drafter, settings())
    before = evaluate(drafter, HELD_OUT, 1, "forward_kl")
    for n in range(150):
        distiller.step(batch(n % 8))
    after = evaluate(drafter, HELD_OUT, 1, "forward_kl")
    assert after.divergence < before.divergence / 3
    assert after.acceptance > before.acceptance + 0.1


def test_every_fourth_step_unrolls_all_depths():
    for most, expected in ((1, [1] * 6), (2, [2] * 6), (3, [3, 2, 2, 2, 3, 2]), (5, [5, 2, 2, 2, 5, 2])):
        drafter = Watched()
        distiller = Distiller(drafter, settings(unroll=most))
        for seed in range(6):
            distiller.step(batch(seed))
        assert [depth for depth, _ in drafter.unrolled] == expected


@pytest.mark.parametrize(("precision", "features", "dtype"), [
    ("auto", {"avx2": True}, torch.float32),
    ("auto", {"avx512_bf16": True}, torch.bfloat16),
    ("auto", {"amx_bf16": True}, torch.bfloat16),
    ("auto", {"bf16": True}, torch.bfloat16),
    ("float32", {"avx512_bf16": True}, torch.float32),
    ("bfloat16", {}, torch.bfloat16),
])  # fmt: skip
def test_precision_of_products_follows_setting_and_cpu(monkeypatch, precision, features, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    layer = torch.nn.Linear(8, 8)
    with optimizer.products(precision, torch.device("cpu")):
        assert layer(torch.ones(2, 8)).dtype == dtype
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_both_precisions_learn_with_float32_weights():
    losses = {}
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        settings = TrainerSettings(precision=precision, learning_rate=0.03, update_tokens=1)
        distiller = Distiller(Toy(), settings)
        batch = collate([make_trace("r", completion=30, seed=1, top_k=6)])
        losses[precision] = [distiller.step(batch).loss for _ in range(40)]
        assert losses[precision][-1] < 0.7 * losses[precision][0]
        assert all(weight.dtype == torch.float32 for weight in distiller.drafter.weights().values())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
