"""Verification rule of recursive rejection over siblings."""

from __future__ import annotations

from typing import ClassVar

import torch

from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


class SiblingsRule(Rule):
    """Rule that tests the children of a node in draw order against the rest of p after the earlier rejections.

    Child x is accepted with probability min(1, r(x) / d(x)), where r starts as p and becomes norm((r - d)+) at each
    rejection. For draws with replacement (SpecInfer), d stays q. For draws without replacement (Sequoia, DySpec), a
    rejection removes x from d and renormalises d, which accepts more. If no child is accepted, the token is drawn from
    r.

    Miao et al., "SpecInfer", ASPLOS 2024; Chen et al., "Sequoia", NeurIPS 2024; Xiong et al., "DySpec", WWW 2025.
    """

    name: ClassVar[str] = "siblings"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT})

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Test siblings in draw order, see ``Rule.verify``; reads whole rows of the vocabulary only at a rejection."""
        batch, _, vocabulary = p.shape
        first, following = draft.links()
        sequences = torch.arange(batch, device=p.device)
        here = torch.zeros(batch, dtype=torch.int64, device=p.device)  # the current row of p of each sequence
        candidate = first[:, 0]
        accepted = torch.zeros_like(here)
        path = torch.full((batch, int(draft.depths().max()) if draft.tokens.numel() else 0), -1, device=p.device)
        # r and d [B, V or Vd]; while ``fresh``, before the first rejection at a node, they are p and q.
        fresh = torch.ones(batch, dtype=torch.bool, device=p.device)
        left = torch.empty(batch, vocabulary, dtype=p.dtype, device=p.device)
        drawn = draft.distributions.new_empty(batch, draft.distributions.shape[-1])
        shares, stays = draft.shares(), draft.drawn(Draw.IID)  # whether d stays q
        d_changes = not bool(stays.all())

        while len(rows := (candidate >= 0).nonzero().squeeze(-1)):
            nodes, new = candidate[rows], fresh[rows]
            tokens, columns = draft.tokens[rows, nodes], draft.columns[rows, nodes]
            r = torch.where(new, p[rows, here[rows], tokens], left[rows, tokens])
            d = shares[rows, nodes]
            if d_changes:
                d = torch.where(new | stays[rows, nodes], d, drawn[rows, columns])
            keep = noise.rows(rows).accept(r / d, Purpose.ACCEPT, nodes)

            on, node = rows[keep], nodes[keep]
            path[on, accepted[on]] = node
            accepted[on] += 1
            here[on] = node + 1
            candidate[on] = first[on, node + 1]
            fresh[on] = True

            off, node, new = rows[~keep], nodes[~keep], new[~keep]
            if not len(off):
                continue
            r, d = p[off, here[off]], draft.q_at(off, node)
            if not bool(new.all()):
                r = torch.where(new[:, None], r, left[off])
                if d_changes:
                    d = torch.where((new | stays[off, node])[:, None], d, drawn[off])
            left[off] = residual(r, draft.spread(d, off, node, vocabulary))[0]
            candidate[off], fresh[off] = following[off, node], False
            if d_changes:
                m = ((candidate[off] >= 0) & ~stays[off, node]).nonzero().squeeze(-1)  # only these read d again
                d[m, columns[~keep][m]] = 0.0
                d = d[m]
                drawn[off[m]] = d / d.sum(-1, keepdim=True)

        after = torch.where(fresh[:, None], p[sequences, here], left)
        return Verdict(path, accepted, noise.pick(after, Purpose.RESIDUAL, here))
