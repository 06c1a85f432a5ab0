"""Sampler of siblings from the distribution after each expanded node."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.verification import tree
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw, TreeBuilder

_MOST = 1 << 20  # bound of the draws from a row, far above real numbers


class SiblingSampler:
    """Sampler of children in B growing trees, from the rows of the builder's q.

    Without replacement, a drawn token is removed from its row, and restored when the trees are finished. Sums over
    blocks of the vocabulary are kept up to date, so draws are fast for any vocabulary.

    Greedy sequences take the most probable remaining token: their p is one-hot, so their output does not depend on the
    choice of a child.
    """

    def __init__(self, builder: TreeBuilder, draw: Draw, greedy: Tensor) -> None:
        """Sample as ``draw`` says, for sequences that are ``greedy`` [B] bool or not."""
        self._builder = builder
        self._draw = draw
        self._best = torch.ones_like(greedy) if draw is Draw.DETERMINISTIC else greedy
        # [E] number of draws so far, and [E, blocks] sums of the open rows
        self._drawn = torch.zeros(builder.tokens.numel(), dtype=torch.int64, device=greedy.device)
        self._sums = torch.empty(0)
        self.share = torch.zeros(builder.tokens.shape, dtype=torch.float64, device=greedy.device)
        """[B, N] probability of each node's token in its parent's q."""

    def open(self, places: Tensor) -> None:
        """Make the builder's distributions ``places`` [M], which are consecutive, available for draws."""
        weights = self._weights()
        if not self._sums.numel():
            self._sums = weights.new_empty(weights.shape[:2])
        start, end = int(places[0]), int(places[-1]) + 1
        self._sums[start:end] = weights[start:end].sum(-1)

    def empty(self, places: Tensor) -> Tensor:
        """Return whether [M] each of the rows ``places`` [M] has no token left."""
        return self._sums[places].sum(-1) == 0

    def largest(self, places: Tensor) -> Tensor:
        """Return the largest remaining probability [M] in the rows ``places`` [M]."""
        return self._weights()[places].flatten(1).amax(-1)

    def left(self, places: Tensor) -> Tensor:
        """Return the number of tokens left [M] in the rows ``places`` [M]; 2 stands for two or more."""
        filled = self._sums[places] > 0  # [M, blocks]
        blocks = filled.sum(-1)
        inner = self._weights()[places, filled.long().argmax(-1)] > 0  # [M, block] of the first block with a token
        return torch.where(blocks > 1, 2, inner.sum(-1).clamp(max=2))

    def take(self, rows: Tensor, places: Tensor, parents: Tensor, noise: Noise, best: Tensor | None = None) -> Tensor:
        """Draw a child from each of M rows of q, and return the new nodes [M].

        The rows of q ``places`` [M] are different and have tokens left. They follow ``parents`` [M], nodes or ROOT, of
        the sequences ``rows`` [M]. ``noise`` covers all B sequences. ``best`` [M] takes the most probable token instead
        of a draw.
        """
        weights, sums = self._weights(), self._sums[places]  # [E, blocks, block], [M, blocks]
        # The number of a draw depends on its own sequence only, not on the rest of the batch.
        index = ((parents + 1) * _MOST + self._drawn[places]) * 2
        self._drawn[places] += 1
        row_noise = noise.rows(rows)
        best = self._best[rows] if best is None else self._best[rows] | best
        chosen = bool(best.any())
        block = row_noise.pick(sums, Purpose.DRAFT, index)
        if chosen:
            block[best] = weights[places[best]].amax(-1).argmax(-1)
        inner = weights[places, block]  # [M, block]
        within = row_noise.pick(inner, Purpose.DRAFT, index + 1)
        if chosen:
            within[best] = inner[best].argmax(-1)

        nodes = self._builder.add(rows, parents, block * tree.BLOCK + within, places)
        self.share[rows, nodes] = inner.gather(-1, within[:, None]).squeeze(-1).double()
        if self._draw is not Draw.IID:
            inner.scatter_(-1, within[:, None], 0.0)
            weights[places, block, within] = 0.0
            self._sums[places, block] = inner.sum(-1)
        return nodes

    def finish(self) -> DraftBatch:
        """Return the current trees, with all drawn tokens restored in their distributions."""
        draft = self._builder.finish(self._draw)
        if self._draw is not Draw.IID and draft.q is not None:
            rows, nodes = draft.valid.nonzero(as_tuple=True)
            draft.q[draft.q_row[rows, nodes], draft.columns[rows, nodes]] = self.share[rows, nodes].to(draft.q.dtype)
        return draft

    def _weights(self) -> Tensor:
        """Return the builder's distributions [E, blocks, block]."""
        q = self._builder.q
        if q is None:
            raise ValueError("there is no distribution to draw from")
        return q.view(len(q), -1, tree.BLOCK)
