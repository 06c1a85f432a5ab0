"""Rules that go down a draft tree from its root, one node at a time, and ask for one row of p for each token."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw

_HALVINGS = 16


class _Descent:
    """Positions of B sequences in their draft trees.

    The sequences ``rows`` [M] still go down and stand on the rows ``here`` [M] of p; ``token`` [B] is for a rule to
    fill.
    """

    def __init__(self, draft: DraftBatch) -> None:
        batch, device = len(draft.sizes), draft.tokens.device
        deepest = int(draft.depths().max()) if draft.tokens.numel() else 0
        self.draft = draft
        self.rows, self.here = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
        self.path = torch.full((batch, deepest), -1, device=device)
        self.accepted, self.token = torch.zeros_like(self.here), torch.zeros_like(self.here)

    def children(self) -> Tensor:
        """[M, N] bool, the nodes behind those that the sequences stand on."""
        return self.draft.valid[self.rows] & (self.draft.parents[self.rows] == self.here[:, None] - 1)

    def go(self, nodes: Tensor) -> None:
        """Go to ``nodes`` [M]; a sequence ends at -1."""
        on = (nodes >= 0).nonzero().squeeze(-1)
        self.rows, self.here = self.rows[on], nodes[on] + 1
        self.path[self.rows, self.accepted[self.rows]] = nodes[on]
        self.accepted[self.rows] += 1

    def verdict(self) -> Verdict:
        """The path of each sequence, and its token."""
        return Verdict(self.path, self.accepted, self.token)


def _first(nodes: Tensor) -> Tensor:
    """[M] the first of ``nodes`` [M, N] bool, -1 where there is none."""
    count = nodes.shape[1]
    if not count:
        return torch.full((len(nodes),), -1, device=nodes.device)
    first = torch.where(nodes, torch.arange(count, device=nodes.device), count).amin(-1)
    return first.masked_fill(first == count, -1)


class Naive(Rule):
    """Draw the next token from p; when a child holds it go there, else emit it.

    Lossless for every tree that was made without looking at these draws: retrieved, top-k, pruned or sampled. The
    rule of prompt lookup and of EAGLE-2's trees; called naive sampling with speculation in Miao et al., "SpecInfer",
    ASPLOS 2024.
    """

    name: ClassVar[str] = "naive"
    draws: ClassVar[frozenset[Draw]] = frozenset(Draw)

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise, first: Tensor | None = None) -> Verdict:
        """See ``Rule.verify``; never reads q.

        Draws are keyed by the depth of their token; with ``first`` [B] int64, the place of the first token in the
        sequence, by its place. When the noise is not keyed by the step, the output then depends on p and the seed
        alone.
        """
        d = _Descent(draft)
        while len(rows := d.rows):
            depth = d.accepted[rows] if first is None else first[rows] + d.accepted[rows]
            drawn = noise.rows(rows).pick(p[rows, d.here], Purpose.BONUS, depth)
            d.token[rows] = drawn
            d.go(_first(d.children() & (draft.tokens[rows] == drawn[:, None])))
        return d.verdict()


class GreedyMultidraft(Rule):
    """Verify children of which all but the last are the most probable tokens and the last was drawn off them.

    With q' the drafter's distribution off the first children, renormalised, the last child y is kept with probability
    min(1, p(y) / q'(y)). Otherwise a token is drawn from norm((p - q')+): when it is one of the first children go
    there, else emit it. Accepts with probability p(first children) + sum over the others of min(p, q'), the most that
    these drafts allow. With two children it accepts as often as SpecHub, whose pairs hold the same tokens.

    Exact whatever the first children are, as long as y was drawn off them; the most probable tokens make the most of
    it.

    Hu et al., "Towards optimal multi-draft speculative decoding", ICLR 2025; Sun et al., "SpecHub", EMNLP 2024.
    """

    name: ClassVar[str] = "greedy_multidraft"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.TOP_THEN_DRAWN, Draw.WITHOUT_REPLACEMENT})
    fixed_width: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """See ``Rule.verify``; touches one row of p and of q for each token that it emits."""
        d, index = _Descent(draft), torch.arange(draft.tokens.shape[1], device=p.device)
        while len(rows := d.rows):
            child, here, after = d.children(), d.here, p[rows, d.here]  # [M, N], [M], [M, V]
            node = torch.full_like(rows, -1)  # where each sequence goes on
            inner = child.any(-1).nonzero().squeeze(-1)
            if len(inner):
                r, y = rows[inner], torch.where(child[inner], index, -1).amax(-1)  # y was drawn
                q = draft.q_at(r, y)
                fixed, which = (child[inner] & (index != y[:, None])).nonzero(as_tuple=True)
                if len(fixed):
                    q[fixed, draft.columns[r[fixed], which]] = 0.0
                    q /= q.sum(-1, keepdim=True)
                share = q[torch.arange(len(r), device=p.device), draft.columns[r, y]]
                keep = noise.rows(r).accept(after[inner, draft.tokens[r, y]] / share, Purpose.ACCEPT, y)
                node[inner[keep]] = y[keep]
                off = inner[~keep]
                after[off] = residual(after[off], draft.spread(q[~keep], r[~keep], y[~keep], p.shape[-1]))[0]
            draw = (node < 0).nonzero().squeeze(-1)
            drawn = noise.rows(rows[draw]).pick(after[draw], Purpose.RESIDUAL, here[draw])
            d.token[rows[draw]] = drawn
            node[draw] = _first(child[draw] & (draft.tokens[rows[draw]] == drawn[:, None]))
            d.go(node)
        return d.verdict()


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
        d, shares, index = _Descent(draft), draft.shares(), torch.arange(draft.tokens.shape[1], device=p.device)
        while len(rows := d.rows):
            here, child, after = d.here, d.children(), p[rows, d.here]
            node = torch.full_like(rows, -1)
            inner = child.any(-1).nonzero().squeeze(-1)
            if len(inner):
                r, k, some = rows[inner], child[inner].sum(-1), _first(child[inner])
                rho = torch.ones(len(r), dtype=p.dtype, device=p.device)
                m = (k > 1).nonzero().squeeze(-1)  # a single child leaves rho no choice
                if len(m):
                    q = draft.spread(draft.q_at(r[m], some[m]), r[m], some[m], p.shape[-1])
                    rho[m] = _rho(after[inner[m]], q, k[m])
                chance = after[inner[:, None], draft.tokens[r].clamp(min=0)] / (rho[:, None] * shares[r])  # [M, N]
                chance = chance.masked_fill(~child[inner], 0.0)
                node[inner] = _first(noise.rows(r).accept(chance, Purpose.ACCEPT, index[None]))
                m = (node[inner] < 0).nonzero().squeeze(-1)
                if len(m):
                    q = draft.spread(draft.q_at(r[m], some[m]), r[m], some[m], p.shape[-1])
                    after[inner[m]] = _left(after[inner[m]], q, rho[m], k[m])
            end = (node < 0).nonzero().squeeze(-1)
            d.token[rows[end]] = noise.rows(rows[end]).pick(after[end], Purpose.RESIDUAL, here[end])
            d.go(node)
        return d.verdict()


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
