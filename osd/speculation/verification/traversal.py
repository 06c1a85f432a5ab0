"""Traversal verification of trees."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.distributions import Distributions
from osd.speculation.memory import recycled
from osd.speculation.noise import Noise, Purpose
from osd.speculation.tree import DraftBatch, Draw
from osd.speculation.verification.base import Verdict, residual


class Traversal:
    """Judge a tree from its leaves up: the first node that passes, children before parents, ends the path.

    A node carries a weight c, 1 at the root. Its child x in draw order gets min(1, c r(x) / d(x)) and is judged with
    its whole subtree; when all of that is rejected, r becomes norm((c r - d)+), c becomes s / (s + 1 - c) with s the
    mass before normalising, and x is taken out of d (unless siblings were drawn with replacement). A node whose
    children are all rejected passes with probability c, and the next token is drawn from its r. On a chain this is
    block verification.

    Weng et al., "Traversal verification for speculative tree decoding", 2025 (arXiv 2505.12398).
    """

    name: ClassVar[str] = "traversal"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT})
    chains_only: ClassVar[bool] = False
    fixed_width: ClassVar[bool] = False

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """See ``Rule.verify``; keeps one row of the vocabulary per depth and touches it only where it matters.

        As s is at most c, a node never gets more weight than it began with. Where its number is not below that, the
        node is lost, and its r and c are computed only for the sake of children that are still to be judged.
        """
        return _Walk(draft, p, noise).verdict()


class _Walk:
    """Where each of B sequences stands in its tree, and what is left of p and q on the way there from the root."""

    def __init__(self, draft: DraftBatch, p: Distributions, noise: Noise) -> None:
        batch, _, vocabulary = p.shape
        device = p.device
        self.draft, self.p, self.noise = draft, p, noise
        self.first, self.following = draft.links()
        self.deepest = int(draft.depths().max()) if draft.tokens.numel() else 0
        self.depth = torch.zeros(batch, dtype=torch.int64, device=device)
        self.candidate = self.first[:, 0].clone()  # the next child to judge, -1 when all are rejected
        # By depth: the row of p after the node that stands there, its weight, and whether it may still pass.
        levels = batch, self.deepest + 1
        self.row = torch.zeros(levels, dtype=torch.int64, device=device)
        self.weight = torch.ones(levels, dtype=p.dtype, device=device)
        self.may_pass = torch.ones(levels, dtype=torch.bool, device=device)
        # r and d are p and q while ``fresh``.
        self.fresh = torch.ones(levels, dtype=torch.bool, device=device)
        self.left = recycled((*levels, vocabulary), p.dtype, device)
        self.drawn = recycled((*levels, draft.q.shape[-1]), draft.q.dtype, device)

    def verdict(self) -> Verdict:
        sequences = torch.arange(len(self.depth), device=self.depth.device)
        rows = sequences
        while len(rows):
            down = self.candidate[rows] >= 0
            self._down(rows[down])
            up = rows[~down]
            passed = self._passes(up)
            self._up(up[~passed])
            rows = torch.cat([rows[down], up[~passed]])
        here = self.row[sequences, self.depth]
        fresh = self.fresh[sequences, self.depth]
        after = self.left[sequences, self.depth]
        after[fresh] = self.p[sequences[fresh], here[fresh]]
        return Verdict(self.draft.path_of(here - 1), self.depth, self.noise.pick(after, Purpose.RESIDUAL, here))

    def _down(self, rows: Tensor) -> None:
        """Go to the candidate children and weigh them."""
        if not len(rows):
            return
        draft, node, level = self.draft, self.candidate[rows], self.depth[rows]
        token, column = draft.tokens[rows, node], draft.columns[rows, node]
        new = self.fresh[rows, level]
        chance = torch.empty_like(self.weight[rows, level])
        if bool(new.any()):
            r, n = rows[new], node[new]
            chance[new] = self.p[r, self.row[r, level[new]], token[new]] / draft.q[draft.q_row[r, n], column[new]]
        old = ~new
        r, at = rows[old], level[old]
        chance[old] = self.left[r, at, token[old]] / self.drawn[r, at, column[old]]
        weight = (self.weight[rows, level] * chance).clamp(max=1)
        below = level + 1
        self.row[rows, below], self.weight[rows, below], self.fresh[rows, below] = node + 1, weight, True
        self.may_pass[rows, below] = self.noise.rows(rows).accept(weight, Purpose.ACCEPT, node)
        self.depth[rows], self.candidate[rows] = below, self.first[rows, node + 1]

    def _passes(self, rows: Tensor) -> Tensor:
        """[M] bool, whether the nodes that sequences ``rows`` [M] stand on pass, their children being rejected."""
        level = self.depth[rows]
        node = self.row[rows, level] - 1
        # The root always passes.
        return (level == 0) | self.noise.rows(rows).accept(
            self.weight[rows, level].masked_fill(~self.may_pass[rows, level] | (level == 0), 0.0), Purpose.ACCEPT, node
        )

    def _up(self, rows: Tensor) -> None:
        """Go back from rejected nodes to the next ones above that may pass or have children to judge."""
        if not len(rows):
            return
        levels = torch.arange(self.deepest + 1, device=rows.device)
        child = self.row[rows][:, 1:] - 1  # [M, deepest] on the way down from each level
        stop = self.may_pass[rows]
        stop[:, :-1] |= self.following[rows].gather(1, child.clamp(min=0)) >= 0
        level = torch.where(stop & (levels < self.depth[rows, None]), levels, 0).amax(-1)
        node = self.row[rows, level + 1] - 1
        self.depth[rows], self.candidate[rows] = level, self.following[rows, node]
        self._reject(rows, level, node)

    def _reject(self, rows: Tensor, level: Tensor, node: Tensor) -> None:
        """Take what the rejected children ``node`` [M] cover out of what is left at the levels above them."""
        draft, fresh = self.draft, self.fresh[rows, level]
        here = self.row[rows, level]
        r, d = self.left[rows, level], self.drawn[rows, level]
        r[fresh] = self.p[rows[fresh], here[fresh]]
        d[fresh] = draft.q_at(rows[fresh], node[fresh])
        c = self.weight[rows, level]
        r, mass = residual(r, draft.spread(d, r.shape[-1]), c)
        if draft.draw is Draw.WITHOUT_REPLACEMENT:
            d[torch.arange(len(rows), device=d.device), draft.columns[rows, node]] = 0.0
            d /= d.sum(-1, keepdim=True)
        self.left[rows, level], self.drawn[rows, level], self.fresh[rows, level] = r, d, False
        self.weight[rows, level] = (mass / (mass + 1 - c)).nan_to_num(nan=1.0)
