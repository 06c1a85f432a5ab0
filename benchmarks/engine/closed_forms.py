"""Closed forms of the probability that a rule accepts one of the drafts of a single token."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.engine.bounds import greedy_acceptance, optimal_acceptance
from osd.verification.base import residual
from osd.verification.tree import Draw

_HALVINGS = 40


def bound(p: Tensor, q: Tensor, drafts: int, draw: Draw) -> Tensor:
    """Return [R], the highest acceptance of any rule for p and q [R, V] and ``drafts`` tokens drawn by ``draw``."""
    if draw is Draw.DETERMINISTIC:
        return _top(p, q, drafts)
    if draw is Draw.TOP_THEN_DRAWN:
        return greedy_acceptance(p, q, drafts)
    return optimal_acceptance(p, q, drafts, draw)


def acceptance(rule: str, p: Tensor, q: Tensor, drafts: int, draw: Draw) -> Tensor | None:
    """Return [R], the probability that ``rule`` accepts one of the drafts for p and q [R, V]; None without a formula.

    With one level of drafts, traversal verification equals ``siblings`` and block verification equals ``chain``.
    """
    p, q = p.double(), q.double()
    if rule == "naive":
        return _naive(p, q, drafts, draw)
    if drafts == 1:
        return torch.minimum(p, q).sum(-1)
    if rule == "greedy_multidraft" and draw is Draw.TOP_THEN_DRAWN:
        return greedy_acceptance(p, q, drafts)
    if rule == "k_seq":
        return _k_seq(p, q, drafts)
    if rule in ("siblings", "traversal") and draw is Draw.IID:
        return _with_replacement(p, q, drafts)
    return None


def _top(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    best = q.topk(min(drafts, q.shape[-1]))
    return (p.double().gather(-1, best.indices) * (best.values > 0)).sum(-1)


def _naive(p: Tensor, q: Tensor, drafts: int, draw: Draw) -> Tensor | None:
    """Return the probability that a token drawn from p is among the drafts."""
    if draw is Draw.DETERMINISTIC:
        return _top(p, q, drafts)
    if drafts == 1:
        return (p * q).sum(-1)
    if draw is Draw.IID:
        return (p * (1 - (1 - q) ** drafts)).sum(-1)
    if draw is Draw.TOP_THEN_DRAWN:
        rest = q.scatter(-1, q.topk(drafts - 1).indices, 0.0)
        mass = rest.sum(-1, keepdim=True)
        return _top(p, q, drafts - 1) + (p * rest / torch.where(mass > 0, mass, 1.0)).sum(-1)
    if drafts == 2 and bool((q < 1).all()):
        odds = q / (1 - q)
        return (p * q * (1 + odds.sum(-1, keepdim=True) - odds)).sum(-1)
    return None


def _with_replacement(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """Return the acceptance of siblings: the residual after a rejection does not depend on the rejected token."""
    remaining, missed = p, torch.ones_like(p[:, 0])
    for _ in range(drafts):
        missed = missed * (1 - torch.minimum(remaining, q).sum(-1))
        remaining = residual(remaining, q)[0]
    return 1 - missed


def _k_seq(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    low, high = torch.ones_like(p[:, :1]), torch.full_like(p[:, :1], drafts)
    for _ in range(_HALVINGS):
        rho = (low + high) / 2
        accepted = torch.minimum(p / rho, q).sum(-1, keepdim=True)
        is_low = 1 - (1 - accepted) ** drafts > rho * accepted
        low, high = torch.where(is_low, rho, low), torch.where(is_low, high, rho)
    return 1 - (1 - torch.minimum(p / high, q).sum(-1)) ** drafts
