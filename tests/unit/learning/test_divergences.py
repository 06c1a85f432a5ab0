from __future__ import annotations

import math

import pytest
import torch

from osd.config import TrainerSettings
from osd.learning.divergences import (
    DIVERGENCES,
    acceptance,
    draft_index,
    forward_kl,
    jensen_shannon,
    overlap,
    reverse_kl,
    total_variation,
)
from osd.learning.objective import divergence_of

N, V = 5, 16


def distributions(seed=0):
    p, logits = torch.randn(2, N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return p.softmax(-1).float(), logits.float()


def captured(p, k):
    top = p.log().topk(k)
    return top.indices, top.values, (1 - p.double().gather(1, top.indices).sum(1)).clamp(min=0).log().float()


def lumped(p, q, k):
    """Return both distributions over the kept ids and the tail."""
    ids = p.topk(k).indices
    parts = [torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, q)]
    return parts[0].double(), parts[1].double()


def kl(p, q):
    return (p * (p.clamp(min=1e-30).log() - q.log())).sum(-1)


def jsd(p, q, beta):
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def reference(name, p, q):
    """Return a divergence by the formula of its paper, in double precision."""
    p, q = p.double(), q.double()
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jensen_shannon": lambda: jsd(p, q, 0.5),
        "total_variation": lambda: 0.5 * (p - q).abs().sum(-1),
        "acceptance": lambda: -torch.minimum(p, q).sum(-1).log(),
        "hybrid": lambda: kl(p, q) + 0.5 * (p - q).abs().sum(-1),
        "lk_hybrid": lambda: lk(kl(p, q), 0.5 * (p - q).abs().sum(-1)),
    }[name]()


def lk(divergence, variation):
    weight = torch.exp(-3 * (1 - variation).mean())
    return weight * divergence + (1 - weight) * variation


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
@pytest.mark.parametrize("k", [1, 4, V - 1, V])
def test_divergences_are_exact_over_kept_ids_and_tail(name, k):
    p, logits = distributions(4)
    ids, logp, tail = captured(p, k)
    tail = torch.full((N,), -math.inf) if k == V else tail
    value = DIVERGENCES[name](overlap(logits, ids, logp, tail, None)).double()
    a, b = (p, logits.softmax(-1)) if k == V else lumped(p, logits.softmax(-1), k)
    assert torch.allclose(value, reference(name, a, b), atol=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_jensen_shannon_beta_weights_both_sides(beta):
    p, logits = distributions(5)
    ids, logp, _ = captured(p, V)
    events = overlap(logits, ids, logp, torch.full((N,), -math.inf), None)
    expected = jsd(p.double(), logits.softmax(-1).double(), beta)
    assert torch.allclose(jensen_shannon(events, beta).double(), expected, atol=1e-6)
    settings = TrainerSettings(divergence="jensen_shannon", jensen_shannon_beta=beta)
    assert torch.equal(divergence_of(settings)(events), jensen_shannon(events, beta))
    assert (divergence_of(settings)(events) - DIVERGENCES["jensen_shannon"](events)).abs().max() > 1e-2


def test_divergence_of_returns_the_configured_one():
    for name, divergence in DIVERGENCES.items():
        if name != "jensen_shannon":
            assert divergence_of(TrainerSettings(divergence=name)) is divergence


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_gradients_are_finite_without_common_mass(name):
    # Row 0: the drafter is certain of an id that the target excludes. Row 1: none of the target's mass can be drafted.
    logits = torch.zeros(2, 4)
    logits[0, 2] = 300.0
    logits.requires_grad_()
    ids = torch.tensor([[0, 1, 2], [9, 10, 11]])
    logp = torch.tensor([[0.0, -1e4, -math.inf], [0.5, 0.25, 0.25]])
    logp[1] = logp[1].log()
    index = draft_index(torch.arange(4))
    value = DIVERGENCES[name](overlap(logits, ids, logp, torch.full((2,), -math.inf), index))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1].eq(0).all()


def test_lk_hybrid_weight_has_no_gradient():
    p, logits = distributions(6)
    logits.requires_grad_()
    ids, logp, _ = captured(p, V)
    events = overlap(logits, ids, logp, torch.full((N,), -math.inf), None)
    weight = float(torch.exp(-3 * (1 - total_variation(events)).mean()).detach())
    mixed = weight * forward_kl(events) + (1 - weight) * total_variation(events)
    hybrid, mixture = (
        torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]
        for value in (DIVERGENCES["lk_hybrid"](events), mixed)
    )
    assert torch.allclose(hybrid, mixture, atol=1e-6)


def test_acceptance_has_a_gradient_without_common_mass():
    logits = torch.zeros(1, V)
    logits[0, 3] = 60.0
    ids, logp = torch.tensor([[0]]), torch.tensor([[0.0]])
    sizes = []
    for divergence in (acceptance, total_variation):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            divergence(overlap(leaf, ids, logp, torch.tensor([-math.inf]), None)).sum(), leaf
        )
        sizes.append(gradient.norm().item())
    assert sizes[0] > 0.5
    assert sizes[1] < 1e-6


def test_best_small_vocabulary_drafter_has_zero_divergence():
    p, _ = distributions()
    draft_ids = torch.tensor([0, 3, 7, 8])
    ids, logp, _ = captured(p, V)
    events = overlap(p[:, draft_ids].log(), ids, logp, torch.full((N,), -math.inf), draft_index(draft_ids))
    for divergence in (acceptance, forward_kl, reverse_kl, jensen_shannon):
        assert divergence(events).abs().max() < 1e-6


def test_small_vocabulary_renormalises_and_weights_the_target():
    p, _ = distributions()
    draft_ids = torch.tensor([1, 4, 5, 9, 15])
    logits = torch.randn(N, len(draft_ids), generator=torch.Generator().manual_seed(1))
    ids, logp, _ = captured(p, V)
    events = overlap(logits, ids, logp, torch.full((N,), -math.inf), draft_index(draft_ids))
    inside = p[:, draft_ids]
    mass = inside.sum(1)
    q = logits.softmax(-1)
    assert torch.allclose(forward_kl(events), mass * kl(inside / mass[:, None], q), atol=1e-5)
    whole = torch.zeros(N, V).index_copy(1, draft_ids, q)
    assert torch.allclose(total_variation(events), 0.5 * (p - whole).abs().sum(-1), atol=1e-6)
    assert torch.allclose(events.accepted(), torch.minimum(p, whole).sum(-1), atol=1e-6)


def test_undraftable_tail_is_lost_and_finite():
    p, _ = distributions()
    draft_ids = p[:1].topk(2).indices[0].sort().values
    logits = torch.randn(1, 2, requires_grad=True)
    events = overlap(logits, *captured(p[:1], 4), draft_index(draft_ids))
    value = forward_kl(events) + total_variation(events)
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad.isfinite().all()
    assert events.lost.item() == pytest.approx(1 - p[0, draft_ids].sum().item(), abs=1e-5)


def test_ids_beyond_the_draft_vocabulary_are_lost():
    assert draft_index(None) is None
    ids, p = torch.tensor([[0, 40, -1]]), torch.tensor([[0.5, 0.5, 0.0]])
    index = draft_index(torch.tensor([0, 5]))
    events = overlap(torch.zeros(1, 2), ids, p.log(), torch.tensor([-math.inf]), index)
    assert events.p.tolist() == [[0.5, 0.0, 0.0]]
    assert events.lost.tolist() == [0.5]
