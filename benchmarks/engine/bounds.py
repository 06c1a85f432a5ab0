"""Upper bounds of the acceptance rate of n draft tokens for any lossless rule.

The best coupling of the target's token with n draft tokens accepts with probability

    1 + min over sets H of tokens: p(H) - Q(H),

where Q(H) is the probability that all n drafts are in H. The tokens with the largest q / p reach the minimum, so one
sort and one pass over the sorted tokens find it. Hu et al., "Towards optimal multi-draft speculative decoding", ICLR
2025.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from osd.verification.tree import Draw

# Trapezoids over log t. The error is of the order exp(-pi^2 / step) for these integrands, below 1e-10.
_STEP, _FROM = 0.4, -12.0
_RANGE = 300.0  # up to this value exp(t) is far from overflow
_GONE = 60.0  # exp(-60) counts as 0
_LAST = 30.0  # if the n - 1 best tokens leave less mass than exp(-30), the remaining tokens count as impossible


def optimal_acceptance(p: Tensor, q: Tensor, drafts: int, draw: Draw) -> Tensor:
    """Return the highest acceptance rate [R] float64 of any lossless rule with ``drafts`` tokens drawn from q.

    Args:
        p: [R, V], distributions of the target.
        q: [R, V], distributions of the drafter.
        drafts: number of draft tokens.
        draw: IID or WITHOUT_REPLACEMENT.

    Raises:
        ValueError: ``drafts`` is below 1, or ``draw`` is another kind.
    """
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, not {drafts}")
    if draw not in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
        raise ValueError(f"the optimum is known for drafts drawn iid or without_replacement, not {draw.value}")
    p, q = p.double(), q.double()
    order = (q / p).nan_to_num(nan=0.0, posinf=torch.inf).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    if drafts == 1 or draw is Draw.IID:
        inside = q.cumsum(-1) ** drafts
    elif drafts == 2:
        # The first draw is i, the second is in H without i: sum over i in H of q_i (q(H) - q_i) / (1 - q_i).
        odds = (q / (1 - q)).nan_to_num(posinf=0.0)  # after a certain first draw no token remains for the second
        inside = q.cumsum(-1) * odds.cumsum(-1) - (q * odds).cumsum(-1)
        inside = torch.where(_outside(q) > 0, inside, 1.0)
    else:
        inside = _all_inside(q, drafts)
    return 1 + (p.cumsum(-1) - inside).amin(-1).clamp(max=0)


def greedy_acceptance(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """Return the acceptance [R] of greedy multi-draft: the n - 1 most probable tokens of q, then a draw from the rest.

    ``p`` and ``q`` are [R, V]. If fewer than n = ``drafts`` tokens have a probability, all of them are drafted.
    """
    p, q = p.double(), q.double()
    best = q.topk(drafts - 1)
    rest = q.scatter(-1, best.indices, 0.0)
    mass = rest.sum(-1, keepdim=True)
    rest /= torch.where(mass > 0, mass, 1.0)
    return (p.gather(-1, best.indices) * (best.values > 0)).sum(-1) + torch.minimum(p, rest).sum(-1)


def _outside(q: Tensor) -> Tensor:
    """Return the mass [R, V] after each token, summed from the end so that small masses are exact."""
    return torch.nn.functional.pad(q.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))


def _all_inside(q: Tensor, drafts: int) -> Tensor:
    """Return [R, V], the probability that n draws without replacement are all among the first tokens of each prefix.

    Let token i ring at an exponential time of rate q_i; the order of ringing is the order of drawing. The draws are in
    H if n tokens of H ring before any other token. With t as the first time outside H,

        1 - Q(H) = (1 - q(H)) sum over j < n of the integral of exp(-t) e_j(exp(q_i t) - 1, i in H) dt,

    where e_j is the elementary symmetric polynomial; e_j of a prefix is a cumulated sum over e_(j-1). The exponent is
    the same for all prefixes, so all of them use one grid of t. A row is done when all but n - 1 tokens have almost
    certainly rung. This is early unless q is peaked; then the sums use logarithms.
    """
    integral = torch.ones_like(q)  # j = 0
    slowest = 1 - q.topk(min(drafts - 1, q.shape[-1])).values.sum(-1)  # [R] lowest rate of the tokens that must ring
    log_t = _FROM
    while len(rows := (slowest * (t := math.exp(log_t)) < _GONE).nonzero().squeeze(-1)) and log_t < _LAST:
        add = _linear if t < _RANGE else _logarithmic
        integral[rows] += add(q[rows] * t, drafts, log_t)
        log_t += _STEP
    return 1 - (_outside(q) * integral).clamp(max=1)


def _linear(exponent: Tensor, drafts: int, log_t: float) -> Tensor:
    """Return [R, V], the sum over j = 1 .. n - 1 of the integrand, multiplied by the step."""
    odds = torch.expm1(exponent)  # odds that a token has rung by t
    total = e = odds.cumsum(-1)
    for _ in range(2, drafts):
        # e_j of the first k tokens sums odds_i e_(j-1)(tokens before i); there is no token before the first.
        e = odds[..., 1:].mul(e[..., :-1]).cumsum(-1)
        e = torch.nn.functional.pad(e, (1, 0))
        total = total + e
    return total * (_STEP * math.exp(log_t - math.exp(log_t)))


def _logarithmic(exponent: Tensor, drafts: int, log_t: float) -> Tensor:
    """Return the same as ``_linear``, for odds that are too large for a float."""
    log_odds = exponent + torch.log(-torch.expm1(-exponent))
    previous = torch.full_like(exponent[..., :1], -torch.inf)
    total, log_e = torch.zeros_like(exponent), torch.zeros_like(exponent)
    for j in range(1, drafts):
        before = log_e if j == 1 else torch.cat([previous, log_e[..., :-1]], -1)
        log_e = torch.logcumsumexp(log_odds + before, -1)
        total += torch.exp(log_e + (log_t - math.exp(log_t)))
    return total * _STEP
