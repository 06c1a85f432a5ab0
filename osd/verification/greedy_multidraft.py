"""Greedy multi-draft verification."""

from __future__ import annotations

from typing import ClassVar

import torch

from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


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
        batch, count = draft.tokens.shape
        index, vocabulary = torch.arange(count, device=p.device), p.shape[-1]
        path = torch.full((batch, int(draft.depths().max()) if count else 0), -1, device=p.device)
        accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
        token = torch.zeros_like(accepted)
        rows, here = torch.arange(batch, device=p.device), torch.zeros_like(accepted)
        while len(rows):
            child = draft.valid[rows] & (draft.parents[rows] == here[:, None] - 1)  # [M, N]
            inner = child.any(-1) if count else torch.zeros_like(rows, dtype=torch.bool)
            last = torch.where(child, index, -1).amax(-1) if count else here  # [M] the child that was drawn
            after = p[rows, here]  # [M, V]
            node = torch.full_like(rows, -1)  # where each sequence goes on

            at = inner.nonzero().squeeze(-1)
            if len(at):
                r, y = rows[at], last[at]
                q = draft.q_at(r, y)
                fixed, which = (child[at] & (index != y[:, None])).nonzero(as_tuple=True)
                if len(fixed):
                    q[fixed, draft.columns[r[fixed], which]] = 0.0
                    q /= q.sum(-1, keepdim=True)
                chance = after[at, draft.tokens[r, y]] / q[torch.arange(len(at), device=p.device), draft.columns[r, y]]
                keep = noise.rows(r).accept(chance, Purpose.ACCEPT, y)
                node[at[keep]] = y[keep]
                off = at[~keep]
                after[off] = residual(after[off], draft.spread(q[~keep], r[~keep], y[~keep], vocabulary))[0]

            draw = (node < 0).nonzero().squeeze(-1)
            drawn = noise.rows(rows[draw]).pick(after[draw], Purpose.RESIDUAL, here[draw])
            if count:
                match = child[draw] & (draft.tokens[rows[draw]] == drawn[:, None])
                node[draw] = torch.where(match, index, -1).amax(-1)
            token[rows[draw]] = drawn

            on = (node >= 0).nonzero().squeeze(-1)
            rows, here = rows[on], node[on] + 1
            path[rows, accepted[rows]] = here - 1
            accepted[rows] += 1
        return Verdict(path, accepted, token)
