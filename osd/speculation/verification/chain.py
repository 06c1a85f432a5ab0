"""Token-level speculative sampling of chains."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.noise import Noise, Purpose
from osd.speculation.tree import DraftBatch, Draw
from osd.speculation.verification.base import Verdict, residual


class Chain:
    """Keep each token x with probability min(1, p(x) / q(x)); at the first rejection draw from norm((p - q)+).

    Lossless when x was drawn from exactly this q. One token is accepted with probability ``sum min(p, q)``, which no
    other rule for one draft token surpasses.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023; Chen et al.,
    "Accelerating large language model decoding with speculative sampling", 2023.
    """

    name: ClassVar[str] = "chain"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.TOP_THEN_DRAWN})
    chains_only: ClassVar[bool] = True
    fixed_width: ClassVar[bool] = False

    def verify(self, draft: DraftBatch, p: Tensor, noise: Noise) -> Verdict:
        """See ``Rule.verify``; reads single entries of p and q, and one row of each per sequence."""
        batch, count = draft.tokens.shape
        rows = torch.arange(batch, device=p.device)
        index = torch.arange(count, device=p.device)
        valid = draft.valid
        p_drawn = p[rows[:, None], index, draft.tokens.clamp(min=0)]  # [B, N]
        keep = noise.accept((p_drawn / draft.shares()).masked_fill(~valid, 0.0), Purpose.ACCEPT, index[None])
        accepted = keep.long().cumprod(-1).sum(-1)
        after = p[rows, accepted]  # [B, V]
        rejected = (accepted < draft.sizes).nonzero().squeeze(-1)
        if len(rejected):
            q = draft.spread(draft.q_at(rejected, accepted[rejected]), p.shape[-1])
            after[rejected] = residual(after[rejected], q)[0]
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)
