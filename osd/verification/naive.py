"""Sample from the target and look whether the draft has it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.verification.base import Rule, Verdict
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


class Naive(Rule):
    """Draw the next token from p; when a child holds it go there, else emit it.

    Lossless for every tree that was made without looking at these draws: retrieved, top-k, pruned or sampled. The
    rule of prompt lookup and of EAGLE-2's trees; called naive sampling with speculation in Miao et al., "SpecInfer",
    ASPLOS 2024.
    """

    name: ClassVar[str] = "naive"
    draws: ClassVar[frozenset[Draw]] = frozenset(Draw)

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise, first: Tensor | None = None) -> Verdict:
        """See ``Rule.verify``; reads one row of p for each token that it emits and never q.

        Draws are keyed by the depth of their token; with ``first`` [B] int64, the place of the first token in the
        sequence, by its place. When the noise is not keyed by the round, the output then depends on p and the seed
        alone.
        """
        batch, count = draft.tokens.shape
        index = torch.arange(count, device=p.device)
        deepest = int(draft.depths().max()) if count else 0
        path = torch.full((batch, deepest), -1, device=p.device)
        accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
        token = torch.zeros_like(accepted)
        rows, here = torch.arange(batch, device=p.device), torch.zeros_like(accepted)
        begin = torch.zeros_like(accepted) if first is None else first
        for depth in range(deepest + 1):
            drawn = noise.rows(rows).pick(p[rows, here], Purpose.BONUS, begin[rows] + depth)
            token[rows] = drawn
            if depth == deepest:
                break
            child = draft.valid[rows] & (draft.parents[rows] == here[:, None] - 1)
            node = torch.where(child & (draft.tokens[rows] == drawn[:, None]), index, count).amin(-1)
            found = (node < count).nonzero().squeeze(-1)
            rows, here = rows[found], node[found] + 1
            path[rows, depth] = here - 1
            accepted[rows] += 1
        return Verdict(path, accepted, token)
