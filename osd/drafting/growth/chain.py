"""Chains, one token after the other, and when they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import Budget, Growth, Source, Stop, expanded, reaches
from osd.runtime.memory import recycled
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, most_probable
from osd.verification.tree import DraftBatch, Draw, TreeBuilder


@dataclass(frozen=True)
class Drawn:
    """The last tokens [M] of chains, as ``columns``, and the ``logits`` [M, Vd] that they were drawn by.

    ``q`` [M, Vd] are their distributions at temperature 1, None where they were drawn by others.
    """

    columns: Tensor
    logits: Tensor
    q: Tensor | None

    def probability(self) -> Tensor:
        """[M] of each token at temperature 1."""
        q = self.q
        if q is None:
            q = torch.softmax(
                self.logits, -1, out=recycled(tuple(self.logits.shape), self.logits.dtype, self.logits.device)
            )
        return q.gather(-1, self.columns[:, None]).squeeze(-1)


GoesOn = Callable[[int, Tensor, Drawn], Tensor]
"""Given how long the chains ``rows`` [M] are now, those rows, and the tokens drawn last, which are kept: [M] bool,
whether to draft on after them."""


class Chain(Growth):
    """Draw ``depth`` tokens one after the other.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
    """

    name: ClassVar[str] = "chain"
    draws = frozenset({Draw.IID})
    chains = True
    fixed_width = True
    stop = Stop()

    def __init__(self, depth: int) -> None:
        """Draw at most ``depth`` tokens, at least 1."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.max_nodes = depth

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: Budget) -> DraftBatch:
        limits = budget.limits.minimum(reaches(source, budget.limits, self.max_nodes))
        builder = TreeBuilder(len(limits), int(limits.max()), source.support, limits.device)
        goes_on = self._watch(source, limits)
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
            rows = rows[room & goes_on(level, rows, Drawn(columns, logits, q if sampling.plain else None))]
        return builder.finish(Draw.IID)

    def _watch(self, source: Source, limits: Tensor) -> GoesOn:
        """What decides, for the drafts of one round, whether they go on; called after each level."""
        return lambda level, rows, drawn: torch.ones_like(drawn.columns, dtype=torch.bool)


class Confidence(Chain):
    """Stop after the first token whose own probability, at temperature 1, is below ``eta``; that token is kept.

    Dropping it would bias the output; stopping after it does not. Where several tokens come of one call, the chain goes
    on to the last of them. The second exit of Kangaroo (Liu et al., NeurIPS
    2024) and the dynamic lookahead of transformers (Mamou et al., 2024, arXiv 2405.04304).
    """

    name: ClassVar[str] = "confidence"

    def __init__(self, eta: float, depth: int) -> None:
        """Stop below probability ``eta`` in [0, 1], and after ``depth`` tokens."""
        super().__init__(depth)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, not {eta}")
        self.eta, self.stop = eta, Stop(below=eta)

    def _watch(self, source: Source, limits: Tensor) -> GoesOn:
        sure = torch.ones(len(limits), dtype=torch.bool, device=limits.device)

        def goes_on(level: int, rows: Tensor, drawn: Drawn) -> Tensor:
            sure[rows] &= drawn.probability() >= self.eta
            return sure[rows] if level % source.block == 0 else torch.ones_like(rows, dtype=torch.bool)

        return goes_on


class Heuristic(Chain):
    """Draft two tokens more after a round that accepted all, one fewer after any other.

    The policy has no memory: whoever runs the rounds keeps each sequence's limit. Lossless, for a depth depends on past
    rounds only. The "heuristic" schedule of transformers' assisted generation.
    """

    name: ClassVar[str] = "heuristic"

    def __init__(self, start: int, depth: int) -> None:
        """Begin with ``start`` tokens and never draft more than ``depth``."""
        super().__init__(depth)
        if not 1 <= start <= depth:
            raise ValueError(f"start must be between 1 and depth {depth}, not {start}")
        self.start = start

    @property
    def first_limit(self) -> int:
        """The depth of a request's first draft."""
        return self.start

    def next_limit(self, limit: int, drafted: int, accepted: int) -> int:
        """See ``Growth.next_limit``; a round that drafted nothing changes nothing."""
        if not drafted:
            return limit
        return min(max(limit + 2 if accepted == drafted else limit - 1, 1), self.max_nodes)


class AcceptanceHead(Chain):
    """Stop when the probability that a token drafted so far is rejected is above ``h``.

    A head on the drafter's state says, of each token that the drafter has read, how probably it is accepted; their
    product is the probability of no rejection. The token drawn last has not been read yet: it does not count, and it
    is kept. So only the next draw is decided, by tokens that were drawn before and stay, which is lossless whatever
    the head says.

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

    def _watch(self, source: Source, limits: Tensor) -> GoesOn:
        unbroken = torch.ones(len(limits), dtype=torch.float64, device=limits.device)  # [B]

        def goes_on(level: int, rows: Tensor, drawn: Drawn) -> Tensor:
            if level > 1:  # before that the drafter has read committed tokens only
                unbroken[rows] *= source.acceptance().double()
            return 1 - unbroken[rows] <= self.h

        return goes_on
