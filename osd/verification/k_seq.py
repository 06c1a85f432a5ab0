"""K-sequential selection."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.verification.base import Rule, Verdict
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw

_HALVINGS = 16


class KSeq(Rule):
    """Try k children drawn with replacement, each kept with probability min(1, p(x) / (rho q(x))).

    With b = sum min(p / rho, q), one of them is kept with probability a = 1 - (1 - b)^k; rho in [1, k] solves
    a = rho b. When none is kept, the token is drawn from p - min(p / rho, q) a / b, which is not
    negative as long as a <= rho b.

    Sun et al., "SpecTr: fast speculative decoding via optimal transport", NeurIPS 2023.
    """

    name: ClassVar[str] = "k_seq"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID})
    fixed_width: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """See ``Rule.verify``; touches one row of p and of q for each token that it emits."""
        batch, count = draft.tokens.shape
        index, shares = torch.arange(count, device=p.device), draft.shares()
        path = torch.full((batch, int(draft.depths().max()) if count else 0), -1, device=p.device)
        accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
        rows, here = torch.arange(batch, device=p.device), torch.zeros_like(accepted)
        after = p[rows, here]
        stand = torch.zeros_like(accepted)
        while count and len(rows):
            child = draft.valid[rows] & (draft.parents[rows] == here[:, None] - 1)  # [M, N]
            inner = child.any(-1)
            rows, here, child = rows[inner], here[inner], child[inner]
            if not len(rows):
                break
            first, k = child.long().argmax(-1), child.sum(-1)
            rho = torch.ones(len(rows), dtype=p.dtype, device=p.device)
            m = (k > 1).nonzero().squeeze(-1)  # a single child leaves rho no choice
            if len(m):
                q = draft.spread(draft.q_at(rows[m], first[m]), rows[m], first[m], p.shape[-1])
                rho[m] = _rho(p[rows[m], here[m]], q, k[m])

            tokens = draft.tokens[rows].clamp(min=0)  # [M, N]
            chance = p[rows[:, None], here[:, None], tokens] / (rho[:, None] * shares[rows])
            keep = noise.rows(rows).accept(chance.masked_fill(~child, 0.0), Purpose.ACCEPT, index[None])  # [M, N]
            node = torch.where(keep, index, count).amin(-1)
            m = (node == count).nonzero().squeeze(-1)
            if len(m):
                q = draft.spread(draft.q_at(rows[m], first[m]), rows[m], first[m], p.shape[-1])
                after[rows[m]] = _left(p[rows[m], here[m]], q, rho[m], k[m])
            on = node < count
            rows, here = rows[on], node[on] + 1
            path[rows, accepted[rows]] = here - 1
            accepted[rows] += 1
            stand[rows] = here
            after[rows] = p[rows, here]
        return Verdict(path, accepted, noise.pick(after, Purpose.RESIDUAL, stand))


def _rho(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Rho [M] for p and q [M, V] and k [M] children.

    Bisection ends at the upper end of its bracket, where a <= rho b holds: exact however few the halvings.
    """
    low, high = torch.ones_like(p[:, 0]), k.to(p.dtype)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        b = torch.minimum(p / middle[:, None], q).sum(-1)
        more = 1 - (1 - b) ** k > middle * b
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return high


def _left(p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> Tensor:
    """[M, V] in proportion to what p has left when none of ``k`` children is kept."""
    kept = torch.minimum(p / rho[:, None], q)
    b = kept.sum(-1)
    share = (1 - (1 - b) ** k) / torch.where(b > 0, b, 1.0)  # a / b
    return torch.addcmul(p, kept, share[:, None], value=-1).clamp_(min=0)
