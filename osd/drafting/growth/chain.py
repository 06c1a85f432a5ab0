"""Chains of tokens, and rules for their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import DraftBudget, Growth, Source, Stop, check_positive, expanded, reaches
from osd.runtime.memory import recycled
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, most_probable
from osd.verification.tree import DraftBatch, Draw, TreeBuilder


@dataclass(frozen=True)
class LastTokens:
    """Last tokens of M chains as ``columns`` [M], and the ``logits`` [M, Vd] that they were drawn from.

    ``q`` [M, Vd] are the distributions at temperature 1, None if other distributions were drawn from.
    """

    columns: Tensor
    logits: Tensor
    q: Tensor | None

    def probability(self) -> Tensor:
        """Return the probabilities [M] of the tokens at temperature 1."""
        q, logits = self.q, self.logits
        if q is None:
            q = torch.softmax(logits, -1, out=recycled(tuple(logits.shape), logits.dtype, logits.device))
        return q.gather(-1, self.columns[:, None]).squeeze(-1)


Continues = Callable[[int, Tensor, LastTokens], Tensor]
"""Function from the current length of chains, their sequences [M] and their last tokens, which stay, to whether [M]
each chain continues."""


class Chain(Growth):
    """Chain of up to ``depth`` tokens, drawn one after the other.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
    """

    name: ClassVar[str] = "chain"
    draws = frozenset({Draw.IID})
    chains = True
    fixed_width = True
    stop = Stop()

    def __init__(self, depth: int) -> None:
        """Draw at most ``depth`` tokens, at least 1."""
        check_positive(depth=depth)
        self.max_nodes = depth

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        limits = budget.limits.minimum(reaches(source, budget.limits, self.max_nodes))
        builder = TreeBuilder(len(limits), int(limits.max()), source.support, limits.device)
        continues = self._end_rule(source, limits)
        rows = (limits > 0).nonzero().squeeze(-1)
        level = 0
        while len(rows):
            nodes = torch.full_like(rows, level - 1)
            places, q, logits = expanded(builder, source, sampling, rows, nodes)
            columns = most_probable(logits) if sampling.all_greedy else noise.rows(rows).pick(q, Purpose.DRAFT, level)
            builder.extend(rows, level, columns, places)
            level += 1
            room = limits[rows] > level
            if not room.any():
                break
            rows = rows[room & continues(level, rows, LastTokens(columns, logits, q if sampling.plain else None))]
        return builder.finish(Draw.IID)

    def _end_rule(self, source: Source, limits: Tensor) -> Continues:
        """Return the rule for the drafts of one step; it is called after each level."""
        return lambda level, rows, drawn: torch.ones_like(drawn.columns, dtype=torch.bool)


class Confidence(Chain):
    """Chain that stops after the first token with a probability at temperature 1 below ``eta``; that token is kept.

    Dropping the token would bias the output; stopping after it does not. If a call gives several tokens, the chain
    continues to the last of them. This is the second exit of Kangaroo (Liu et al., NeurIPS 2024) and the dynamic
    lookahead of transformers (Mamou et al., 2024, arXiv 2405.04304).
    """

    name: ClassVar[str] = "confidence"

    def __init__(self, eta: float, depth: int) -> None:
        """Stop below probability ``eta`` in [0, 1], and after ``depth`` tokens."""
        super().__init__(depth)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, not {eta}")
        self.eta, self.stop = eta, Stop(below=eta)

    def _end_rule(self, source: Source, limits: Tensor) -> Continues:
        sure = torch.ones(len(limits), dtype=torch.bool, device=limits.device)

        def continues(level: int, rows: Tensor, drawn: LastTokens) -> Tensor:
            sure[rows] &= drawn.probability() >= self.eta
            return sure[rows] if level % source.block == 0 else torch.ones_like(rows, dtype=torch.bool)

        return continues


class Heuristic(Chain):
    """Chain of two more tokens after a step that accepted all of them, and one fewer after any other step.

    The caller keeps the limit of each sequence. The policy is lossless because a depth depends on earlier steps only.
    It is the "heuristic" schedule of transformers' assisted generation.
    """

    name: ClassVar[str] = "heuristic"

    def __init__(self, start: int, depth: int) -> None:
        """Start with ``start`` tokens, and draft at most ``depth``."""
        super().__init__(depth)
        if not 1 <= start <= depth:
            raise ValueError(f"start must be between 1 and depth {depth}, not {start}")
        self.start = start

    @property
    def first_limit(self) -> int:
        return self.start

    def next_limit(self, limit: int, drafted: int, accepted: int) -> int:
        """Return ``limit`` plus 2 if all tokens were accepted, else minus 1; an empty draft changes nothing."""
        if not drafted:
            return limit
        return min(max(limit + 2 if accepted == drafted else limit - 1, 1), self.max_nodes)


class AcceptanceHeadChain(Chain):
    """Chain that stops when the probability of a rejection so far is above ``h``.

    A head on the drafter's state predicts the acceptance of each token that the drafter has read; the product is the
    probability of no rejection. The last drawn token is not read yet, so it does not count and stays in the draft. The
    rule therefore depends on earlier tokens only and is lossless for any head.

    Huang, Guo and Wang, "SpecDec++: boosting speculative decoding via adaptive candidate lengths", COLM 2025 (arXiv
    2405.19715). The head is ``osd.drafting.acceptance_head``.
    """

    name: ClassVar[str] = "acceptance_head"

    def __init__(self, h: float, depth: int) -> None:
        """Stop above probability ``h`` in [0, 1], and after ``depth`` tokens."""
        super().__init__(depth)
        if not 0 <= h <= 1:
            raise ValueError(f"h must be between 0 and 1, not {h}")
        self.h, self.stop = h, Stop(above=h)

    def _end_rule(self, source: Source, limits: Tensor) -> Continues:
        accepted = torch.ones(len(limits), dtype=torch.float64, device=limits.device)  # [B] probability

        def continues(level: int, rows: Tensor, drawn: LastTokens) -> Tensor:
            if level > 1:  # before, the drafter has read committed tokens only
                accepted[rows] *= source.acceptance().double()
            return 1 - accepted[rows] <= self.h

        return continues
