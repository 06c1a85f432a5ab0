"""Verification rules for chains: token by token, or the chain as a block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


class ChainRule(Rule):
    """Rule that accepts each token x with probability min(1, p(x) / q(x)).

    At the first rejection the next token is drawn from norm((p - q)+). The rule is lossless if x was drawn from exactly
    this q. A token is accepted with probability ``sum min(p, q)``, the maximum over all rules for a single draft token.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023; Chen et al.,
    "Accelerating large language model decoding with speculative sampling", 2023.
    """

    name: ClassVar[str] = "chain"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.TOP_THEN_DRAWN})
    chains_only: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Test tokens in order, see ``Rule.verify``; a CPU stops at a rejection, other devices test all together."""
        batch, count = draft.tokens.shape
        every, index = torch.arange(batch, device=p.device), torch.arange(count, device=p.device)
        accepted, shares = torch.zeros_like(every), draft.shares()
        if p.device.type == "cpu":
            rows = draft.sizes.nonzero().squeeze(-1)
            while len(rows):
                level = accepted[rows]  # equal in all rows
                chance = p[rows, level, draft.tokens[rows, level]] / shares[rows, level]
                rows = rows[noise.rows(rows).accept(chance, Purpose.ACCEPT, level)]
                accepted[rows] += 1
                rows = rows[accepted[rows] < draft.sizes[rows]]
        else:
            chance = p[every[:, None], index, draft.tokens.clamp(min=0)] / shares  # [B, N]
            kept = noise.accept(chance, Purpose.ACCEPT, index[None]) & draft.valid
            accepted = kept.long().cumprod(-1).sum(-1)
        after, rejected = p[every, accepted], accepted < draft.sizes  # [B, V], [B]
        rows = _some(rejected)
        if count and len(rows):
            at = accepted[rows].clamp(max=count - 1)
            left, _ = residual(after[rows], draft.spread(draft.q_at(rows, at), rows, at, p.shape[-1]))
            _put(after, rows, rejected[rows], left)
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)


class BlockRule(Rule):
    """Rule that tests each prefix of a chain and accepts the longest prefix that passes.

    With w(i) = min(1, w(i-1) p(x_i) / q(x_i)) and z(i) = sum (w(i) p - q)+ after x_i, the prefix of i tokens passes
    with probability z / (z + 1 - w), the whole chain with probability w. The token after a prefix is drawn from
    norm((w p - q)+), after the whole chain from p. On average the rule accepts at least as many tokens as ``chain``.

    Sun et al., "Block verification accelerates speculative decoding", ICLR 2025.
    """

    name: ClassVar[str] = "block"
    draws: ClassVar[frozenset[Draw]] = ChainRule.draws
    chains_only: ClassVar[bool] = True

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Test prefixes, see ``Rule.verify``; a CPU begins with the longest and stops at the first that passes.

        A prefix passes with probability w at most, because z is at most w. If its random number is not below w, z is
        not computed.
        """
        batch, count = draft.tokens.shape
        every, lengths = torch.arange(batch, device=p.device), torch.arange(count + 1, device=p.device)
        index = lengths[:count]
        ratio = p[every[:, None], index, draft.tokens.clamp(min=0)] / draft.shares()  # [B, N]
        weights = torch.ones(batch, count + 1, dtype=p.dtype, device=p.device)  # w(0) .. w(N)
        for length in range(1, count + 1):
            weights[:, length] = (weights[:, length - 1] * ratio[:, length - 1]).clamp(max=1)
        inside = (lengths > 0) & (lengths <= draft.sizes[:, None])
        # [B, N + 1] the prefixes that may pass; the empty prefix always passes
        may = noise.accept(weights.masked_fill(~inside, 0.0), Purpose.ACCEPT, lengths[None] - 1) | (lengths == 0)
        accepted, passed = torch.zeros_like(every), torch.zeros_like(every, dtype=torch.bool)
        after = torch.empty(batch, p.shape[-1], dtype=p.dtype, device=p.device)
        for _ in range(count + 1):
            rows = _some(~passed)
            if not len(rows):
                break
            longest = torch.where(may[rows], lengths, 0).amax(-1)
            may[rows, longest] = False
            left, passes = p[rows, longest], longest == draft.sizes[rows]  # the whole chain passes with probability w
            part = _some(~passes)
            if count and len(part):
                r, at, prefix = rows[part], longest[part].clamp(max=count - 1), ~passes[part]
                w, q = weights[r, at], draft.spread(draft.q_at(r, at), r, at, p.shape[-1])
                rest, mass = residual(left[part], q, w)
                chance = (mass / (mass + 1 - w)).nan_to_num(nan=1.0).masked_fill(at == 0, 1.0)  # rounding aside
                _put(left, part, prefix, rest)
                _put(passes, part, prefix, noise.rows(r).accept(chance, Purpose.ACCEPT, at - 1))
            on = _some(passes)
            ends, here = rows[on], passes[on] & ~passed[rows[on]]
            _put(after, ends, here, left[on])
            _put(accepted, ends, here, longest[on])
            passed[ends] |= here
        token = noise.pick(after, Purpose.RESIDUAL, accepted)
        return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)


def _some(mask: Tensor) -> Tensor:
    """Return the indices [M] where ``mask`` [B] is true; all indices on a device, because a count would wait for it."""
    if mask.device.type == "cpu":
        return mask.nonzero().squeeze(-1)
    return torch.arange(len(mask), device=mask.device)


def _put(values: Tensor, rows: Tensor, mask: Tensor, new: Tensor) -> None:
    """Set ``values`` [B, ...] to ``new`` [M, ...] at the ``rows`` [M] for which ``mask`` [M] is true.

    On a CPU the mask is true for all rows, because ``_some`` chose them.
    """
    if mask.device.type != "cpu":
        new = torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, values[rows])
    values[rows] = new
