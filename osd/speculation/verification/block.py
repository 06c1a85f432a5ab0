"""Block verification of chains."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.noise import Noise, Purpose
from osd.speculation.tree import DraftBatch, Draw
from osd.speculation.verification.base import Verdict, residual


class Block:
    """Judge a chain as a whole: the longest prefix that passes its own test stays.

    With w(i) = min(1, w(i-1) p(x_i) / q(x_i)) and z(i) = sum (w(i) p - q)+ after x_i, the prefix of i tokens passes
    with probability z / (z + 1 - w), the whole chain with probability w. The token after a prefix is drawn from
    norm((w p - q)+), after the whole chain from p. Never keeps less on average than the token-level rule.

    Sun et al., "Block verification accelerates speculative decoding", ICLR 2025.
    """

    name: ClassVar[str] = "block"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.TOP_THEN_DRAWN})
    chains_only: ClassVar[bool] = True
    fixed_width: ClassVar[bool] = False

    def verify(self, draft: DraftBatch, p: Tensor, noise: Noise) -> Verdict:
        """See ``Rule.verify``; tests the longest prefix first and computes no further than the first that passes."""
        batch, count = draft.tokens.shape
        rows, index = torch.arange(batch, device=p.device), torch.arange(count, device=p.device)
        weights = p.new_ones(batch, count + 1)  # w(0) .. w(N)
        ratio = p[rows[:, None], index, draft.tokens.clamp(min=0)] / draft.shares()
        for length in range(1, count + 1):
            weights[:, length] = (weights[:, length - 1] * ratio[:, length - 1]).clamp(max=1)

        accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
        after = p[:, 0].clone()
        open_ = draft.sizes > 0
        for length in range(count, -1, -1):
            whole = (open_ & (draft.sizes == length)).nonzero().squeeze(-1)
            part = (open_ & (draft.sizes > length)).nonzero().squeeze(-1)
            w = weights[part, length]
            q = draft.spread(draft.q_at(part, torch.full_like(part, length)), p.shape[-1]) if len(part) else p[part, 0]
            rest, mass = residual(p[part, length], q, w)
            # The empty prefix always passes; its w is 1 and so is its probability, rounding aside.
            chance = torch.ones_like(w) if length == 0 else (mass / (mass + 1 - w)).nan_to_num(nan=1.0)
            passed = noise.rows(part).accept(chance, Purpose.ACCEPT, length - 1)
            kept = noise.rows(whole).accept(weights[whole, length], Purpose.ACCEPT, length - 1)
            after[part[passed]] = rest[passed]
            after[whole[kept]] = p[whole[kept], length]
            closed = torch.cat([part[passed], whole[kept]])
            accepted[closed] = length
            open_[closed] = False
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)
