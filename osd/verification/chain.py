"""Token-level speculative sampling of chains."""

from __future__ import annotations

from typing import ClassVar

import torch

from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


class Chain(Rule):
    """Keep each token x with probability min(1, p(x) / q(x)); at the first rejection draw from norm((p - q)+).

    Lossless when x was drawn from exactly this q. One token is accepted with probability ``sum min(p, q)``, which no
    other rule for one draft token surpasses.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023; Chen et al.,
    "Accelerating large language model decoding with speculative sampling", 2023.
    """

    name: ClassVar[str] = "chain"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.TOP_THEN_DRAWN})
    chains_only: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """See ``Rule.verify``; reads p no further than the first rejection, where that need not be waited for."""
        if p.device.type != "cpu":
            return self._all_levels(draft, p, noise)
        batch, count = draft.tokens.shape
        index, shares = torch.arange(count, device=p.device), draft.shares()
        accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
        rows = draft.sizes.nonzero().squeeze(-1)
        while len(rows):
            level = accepted[rows]  # the same for all
            chance = p[rows, level, draft.tokens[rows, level]] / shares[rows, level]
            rows = rows[noise.rows(rows).accept(chance, Purpose.ACCEPT, level)]
            accepted[rows] += 1
            rows = rows[accepted[rows] < draft.sizes[rows]]
        after = p[torch.arange(batch, device=p.device), accepted]  # [B, V]
        rejected = (accepted < draft.sizes).nonzero().squeeze(-1)
        if len(rejected):
            at = accepted[rejected]
            q = draft.spread(draft.q_at(rejected, at), rejected, at, p.shape[-1])
            after[rejected] = residual(after[rejected], q)[0]
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)

    def _all_levels(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """The same by operations that never ask the device for a value."""
        batch, count = draft.tokens.shape
        rows, index = torch.arange(batch, device=p.device), torch.arange(count, device=p.device)
        chance = p[rows[:, None], index, draft.tokens.clamp(min=0)] / draft.shares()  # [B, N]
        kept = noise.accept(chance, Purpose.ACCEPT, index[None]) & draft.valid
        accepted = kept.long().cumprod(-1).sum(-1)
        after = p[rows, accepted]  # [B, V]
        if count:
            at = accepted.clamp(max=count - 1)
            left, _ = residual(after, draft.spread(draft.q_at(rows, at), rows, at, p.shape[-1]))
            after = torch.where((accepted < draft.sizes)[:, None], left, after)
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)
