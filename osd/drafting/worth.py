"""What drafted tokens have to bring: tokens per second, by what a forward of one more row costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from torch import Tensor

from osd.economy.costs import CostModel


@dataclass(frozen=True)
class PayingTrees:
    """Trees to be grown level by level, as growth ``best_first`` grows them, of sequences that are drawn alike.

    Attributes:
        room: the nodes that each sequence may have; the roots of those with any are asked about.
        levels: of the deepest trees.
        children: of a node that are looked at.
        chances: [depths, ranks, buckets] float64 that a candidate is kept if its parent is.
        firsts: [depths] the same of first children whose estimates are not known yet.
        edges: [buckets - 1] of the drafter's estimates, between two buckets.
        worth: of the round without them.
    """

    room: Sequence[int]
    levels: int
    children: int
    chances: Tensor
    firsts: Tensor
    edges: Tensor
    worth: Worth


@dataclass(frozen=True)
class Worth:
    """What a round gives and takes without further drafts.

    Attributes:
        tokens: that the round is expected to give, beside those that a grammar forces.
        rows: of the target's forward.
        seconds: [most + 1] that rounds with 0, 1, 2, ... rows take.
        usual: sequences that draw a token in a round without prompts and without tokens that a grammar forces; None
            where this is such a round. What a second is worth is then taken from that round: a draft beside a prompt
            must earn no less, and one behind forced tokens no more.
        costs: of everything else, for drafters that have calls to decide on.
        streams: sequences that draw a token in this round.
    """

    tokens: float
    rows: int
    seconds: np.ndarray
    usual: int | None
    costs: CostModel
    streams: int

    @property
    def room(self) -> int:
        """Further rows whose cost is known."""
        return len(self.seconds) - 1 - self.rows

    @property
    def speed(self) -> float:
        """Tokens that a second is worth, if nothing more is drafted."""
        if self.usual is not None:
            return float(self.usual / self.seconds[self.usual])
        return float(self.tokens / self.seconds[self.rows])

    def price(self, nodes: int, speed: float) -> float:
        """What each of so many nodes costs, in tokens, where a second is worth ``speed`` of them."""
        end = min(self.rows + max(nodes, 1), len(self.seconds) - 1)
        return speed * float(self.seconds[end] - self.seconds[self.rows]) / max(end - self.rows, 1)

    def floor(self) -> float:
        """A chance to be kept below which no node pays, whatever else is drafted."""
        more = self.seconds[self.rows + 1 :] - self.seconds[self.rows]
        if not len(more):
            return 1.0
        return float(max(0.0, self.speed * (more / np.arange(1, len(more) + 1)).min()))

    def best(self, chances: Sequence[float], sequences: int) -> int:
        """How many of the nodes with these ``chances``, which never rise, give the most.

        The tokens per second of the round are made largest; beside prompts, the tokens less the worth of the seconds
        (Dinkelbach 1967 has the relation of both).

        Args:
            chances: that each node is kept, of drafts for ``sequences``.
            sequences: how many may draft.
        """
        count = min(len(chances), self.room)
        tokens = list(accumulate(chances[:count], initial=self.tokens))
        seconds = self.seconds[self.rows : self.rows + count + 1].tolist()
        if self.usual is None:
            speeds = [given / taken for given, taken in zip(tokens, seconds, strict=True)]
            return speeds.index(max(speeds))
        share, last = self.usual / max(sequences, 1), len(self.seconds) - 1
        speed = max(
            (self.usual + share * (given - self.tokens)) / self.seconds[min(int(self.usual + share * nodes), last)]
            for nodes, given in enumerate(tokens)
        )
        values = [given - speed * taken for given, taken in zip(tokens, seconds, strict=True)]
        return values.index(max(values))

    def after(self, nodes: int, expected: float) -> Worth:
        """The same with a draft of so many ``nodes``, of which ``expected`` are kept."""
        return replace(self, rows=min(self.rows + nodes, len(self.seconds) - 1), tokens=self.tokens + expected)
