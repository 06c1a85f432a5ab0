"""Verification rules that walk down a draft tree from its root and read a single row of p per output token."""

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

    Attributes:
        rows: [M], the sequences whose walk has not ended.
        here: [M], their rows of p.
        token: [B], the last token of each sequence; the rule fills it.
    """

    def __init__(self, draft: DraftBatch) -> None:
        batch, device = len(draft.sizes), draft.tokens.device
        deepest = int(draft.depths().max()) if draft.tokens.numel() else 0
        self.draft = draft
        self.rows, self.here = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
        self.path = torch.full((batch, deepest), -1, device=device)
        self.accepted, self.token = torch.zeros_like(self.here), torch.zeros_like(self.here)

    def children(self) -> Tensor:
        """Return [M, N] bool, whether a node is a child of the current node of a sequence."""
        return self.draft.valid[self.rows] & (self.draft.parents[self.rows] == self.here[:, None] - 1)

    def go(self, nodes: Tensor) -> None:
        """Move to ``nodes`` [M]; a walk ends at -1."""
        on = (nodes >= 0).nonzero().squeeze(-1)
        self.rows, self.here = self.rows[on], nodes[on] + 1
        self.path[self.rows, self.accepted[self.rows]] = nodes[on]
        self.accepted[self.rows] += 1

    def verdict(self) -> Verdict:
        """Return the path and the last token of each sequence."""
        return Verdict(self.path, self.accepted, self.token)


def _first(nodes: Tensor) -> Tensor:
    """Return the first node [M] that ``nodes`` [M, N] bool marks, -1 for none."""
    count = nodes.shape[1]
    if not count:
        return torch.full((len(nodes),), -1, device=nodes.device)
    first = torch.where(nodes, torch.arange(count, device=nodes.device), count).amin(-1)
    return first.masked_fill(first == count, -1)


class NaiveRule(Rule):
    """Rule that draws the next token from p, and moves to the child with this token if there is such a child.

    The rule is lossless for every tree that does not depend on these draws: retrieved, top-k, pruned or sampled. Prompt
    lookup and EAGLE-2's trees are verified like this; Miao et al., "SpecInfer", ASPLOS 2024, call it naive sampling
    with speculation.
    """

    name: ClassVar[str] = "naive"
    draws: ClassVar[frozenset[Draw]] = frozenset(Draw)

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise, first: Tensor | None = None) -> Verdict:
        """Follow tokens drawn from p through the trees, see ``Rule.verify``; q is not read.

        Each draw is keyed by the depth of its token, or with ``first`` by the position of its token in the sequence. If
        the noise is not keyed by the step, the output then depends only on p and the seed.

        Args:
            draft: see ``Rule.verify``.
            p: see ``Rule.verify``.
            noise: see ``Rule.verify``.
            first: [B] int64, position of the first new token in each sequence.
        """
        d = _Descent(draft)
        while len(rows := d.rows):
            depth = d.accepted[rows] if first is None else first[rows] + d.accepted[rows]
            drawn = noise.rows(rows).pick(p[rows, d.here], Purpose.BONUS, depth)
            d.token[rows] = drawn
            d.go(_first(d.children() & (draft.tokens[rows] == drawn[:, None])))
        return d.verdict()


class GreedyMultidraftRule(Rule):
    """Rule for children that are the most probable tokens, followed by a last child that was drawn.

    Let q' be the drafter's distribution without the first children, renormalised. The last child y is accepted with
    probability min(1, p(y) / q'(y)). Otherwise a token is drawn from norm((p - q')+), and a first child with this token
    is accepted. A child is accepted with probability p(first children) + sum over the other tokens of min(p, q'), the
    maximum for these drafts. With two children this equals SpecHub, whose pairs have the same tokens.

    If y was drawn from q', the rule is lossless for any first children. The most probable tokens are accepted most.

    Hu et al., "Towards optimal multi-draft speculative decoding", ICLR 2025; Sun et al., "SpecHub", EMNLP 2024.
    """

    name: ClassVar[str] = "greedy_multidraft"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.TOP_THEN_DRAWN, Draw.WITHOUT_REPLACEMENT})
    fixed_width: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Verify trees from the root down, see ``Rule.verify``; reads one row of p and of q per output token."""
        d, index = _Descent(draft), torch.arange(draft.tokens.shape[1], device=p.device)
        while len(rows := d.rows):
            child, here, after = d.children(), d.here, p[rows, d.here]  # [M, N], [M], [M, V]
            node = torch.full_like(rows, -1)  # the next node of each sequence
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


class KSeqRule(Rule):
    """Rule that accepts each of k children, drawn with replacement, with probability min(1, p(x) / (rho q(x))).

    With b = sum min(p / rho, q), some child is accepted with probability a = 1 - (1 - b)^k; rho in [1, k] solves
    a = rho b. If no child is accepted, the token is drawn from p - min(p / rho, q) a / b, which is not negative if
    a <= rho b.

    Sun et al., "SpecTr: fast speculative decoding via optimal transport", NeurIPS 2023.
    """

    name: ClassVar[str] = "k_seq"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID})
    fixed_width: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Verify trees from the root down, see ``Rule.verify``; reads one row of p and of q per output token."""
        d, shares, index = _Descent(draft), draft.shares(), torch.arange(draft.tokens.shape[1], device=p.device)
        while len(rows := d.rows):
            here, child, after = d.here, d.children(), p[rows, d.here]
            node = torch.full_like(rows, -1)
            inner = child.any(-1).nonzero().squeeze(-1)
            if len(inner):
                r, k, some = rows[inner], child[inner].sum(-1), _first(child[inner])
                rho = torch.ones(len(r), dtype=p.dtype, device=p.device)
                m = (k > 1).nonzero().squeeze(-1)  # rho is 1 for a single child
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
    """Return rho [M] for p and q [M, V] and k [M] children.

    The result is the upper end of the bracket of the bisection, where a <= rho b holds. So the rule is lossless for any
    number of halvings.
    """
    low, high = torch.ones_like(p[:, 0]), k.to(p.dtype)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        b = torch.minimum(p / middle[:, None], q).sum(-1)
        more = 1 - (1 - b) ** k > middle * b
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return high


def _left(p: Tensor, q: Tensor, rho: Tensor, k: Tensor) -> Tensor:
    """Return weights [M, V] of the next token if none of ``k`` children is accepted."""
    kept = torch.minimum(p / rho[:, None], q)
    b = kept.sum(-1)
    share = (1 - (1 - b) ** k) / torch.where(b > 0, b, 1.0)  # a / b
    return torch.addcmul(p, kept, share[:, None], value=-1).clamp_(min=0)
