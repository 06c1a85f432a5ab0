"""Verification rule that traverses trees from the leaves up."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.runtime.memory import recycled
from osd.verification.base import Rule, Verdict, residual
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch, Draw


class TraversalRule(Rule):
    """Rule that tests the nodes of a tree from the leaves up; the first node that passes ends the path.

    A node has a weight c, 1 at the root. Its child x in draw order gets the weight min(1, c r(x) / d(x)), and its
    subtree is tested. If the whole subtree is rejected, r becomes norm((c r - d)+) and c becomes s / (s + 1 - c), where
    s is the mass before ``norm``; x is removed from d unless siblings were drawn with replacement. A node whose
    children are all rejected passes with probability c, and the next token is drawn from its r. On a chain this is
    block verification.

    Weng et al., "Traversal verification for speculative tree decoding", 2025 (arXiv 2505.12398).
    """

    name: ClassVar[str] = "traversal"
    draws: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.WITHOUT_REPLACEMENT})

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Verify trees from the leaves up, see ``Rule.verify``; stores a row of the vocabulary per depth.

        The weight of a node never grows, because s is at most c. If the random number of a node is not below its first
        weight, the node is rejected, and its r and c are computed only if children remain.
        """
        return _Walk(draft, p, noise).verdict()


class _Walk:
    """Position of each of B sequences in its tree, with the rest of p and q at each level of its path."""

    def __init__(self, draft: DraftBatch, p: Distributions, noise: Noise) -> None:
        batch, _, vocabulary = p.shape
        device = p.device
        self.draft, self.p, self.noise = draft, p, noise
        self.first, self.following = draft.links()
        self.deepest = int(draft.depths().max()) if draft.tokens.numel() else 0
        self.depth = torch.zeros(batch, dtype=torch.int64, device=device)
        self.candidate = self.first[:, 0].clone()  # the next child to test, -1 if all are rejected
        # By depth of the path: the row of p after the node, the weight of the node, and whether it may still pass.
        levels = batch, self.deepest + 1
        self.row = torch.zeros(levels, dtype=torch.int64, device=device)
        self.weight = torch.ones(levels, dtype=p.dtype, device=device)
        self.may_pass = torch.ones(levels, dtype=torch.bool, device=device)
        # r and d are p and q while ``fresh``.
        self.fresh = torch.ones(levels, dtype=torch.bool, device=device)
        self.left = recycled((*levels, vocabulary), p.dtype, device)
        self.shares, q = draft.shares(), draft.distributions
        self.stays = draft.drawn(Draw.IID)  # whether d stays q
        d_changes = not bool(self.stays.all())
        self.drawn = recycled((*levels, q.shape[-1]), q.dtype, device) if d_changes else None

    def verdict(self) -> Verdict:
        """Walk until a node of each sequence passes."""
        sequences = torch.arange(len(self.depth), device=self.depth.device)
        rows = sequences
        while len(rows):
            self._down(rows[self.candidate[rows] >= 0])
            rows = rows[~self._passes(rows)]
            self._up(rows)
        here = self.row[sequences, self.depth]
        fresh = self.fresh[sequences, self.depth]
        after = self.left[sequences, self.depth]
        after[fresh] = self.p[sequences[fresh], here[fresh]]
        return Verdict(self.draft.path_of(here - 1), self.depth, self.noise.pick(after, Purpose.RESIDUAL, here))

    def _down(self, rows: Tensor) -> None:
        """Move to the candidate children and on to first children down to a leaf; weigh all nodes of this path."""
        if not len(rows):
            return
        draft, top = self.draft, self.depth[rows]
        path = self._leftmost(rows)
        on = path >= 0
        m, k = on.nonzero(as_tuple=True)
        row, node, level = rows[m], path[on], top[m] + k
        above = torch.cat([self.row[rows, top][:, None], path[:, :-1] + 1], 1)[on]
        token = draft.tokens[row, node]
        r, d = self.p[row, above, token], self.shares[row, node]
        used = ((k == 0) & ~self.fresh[row, level]).nonzero().squeeze(-1)
        if len(used):
            r[used] = self.left[row[used], level[used], token[used]]
            if self.drawn is not None:
                used = used[~self.stays[row[used], node[used]]]
                d[used] = self.drawn[row[used], level[used], draft.columns[row[used], node[used]]]
        weight = torch.zeros(path.shape, dtype=r.dtype, device=r.device)
        weight[on] = r / d
        before = self.weight[rows, top]
        for here in weight.unbind(1):
            here.mul_(before).clamp_(max=1)
            before = here
        below = level + 1
        self.row[row, below], self.weight[row, below], self.fresh[row, below] = node + 1, weight[on], True
        self.may_pass[row, below] = self.noise.rows(rows).accept(weight, Purpose.ACCEPT, path)[on]
        self.depth[rows], self.candidate[rows] = top + on.sum(-1), -1

    def _leftmost(self, rows: Tensor) -> Tensor:
        """Return [M, K] the candidate children of sequences ``rows`` [M], their first children and so on, then -1."""
        node, path = self.candidate[rows], []
        while bool((node >= 0).any()):
            path.append(node)
            node = torch.where(node >= 0, self.first[rows, node + 1], -1)
        return torch.stack(path, 1)

    def _passes(self, rows: Tensor) -> Tensor:
        """Return [M] bool, whether the current nodes of sequences ``rows`` [M] pass; their children are rejected."""
        level = self.depth[rows]
        node = self.row[rows, level] - 1
        # The root always passes.
        return (level == 0) | self.noise.rows(rows).accept(
            self.weight[rows, level].masked_fill(~self.may_pass[rows, level] | (level == 0), 0.0), Purpose.ACCEPT, node
        )

    def _up(self, rows: Tensor) -> None:
        """Move from rejected nodes to the nearest ancestors that may pass or have children left to test."""
        if not len(rows):
            return
        levels = torch.arange(self.deepest + 1, device=rows.device)
        child = self.row[rows][:, 1:] - 1  # [M, deepest] the path's node below each level
        stop = self.may_pass[rows]
        stop[:, :-1] |= self.following[rows].gather(1, child.clamp(min=0)) >= 0
        level = torch.where(stop & (levels < self.depth[rows, None]), levels, 0).amax(-1)
        node = self.row[rows, level + 1] - 1
        self.depth[rows], self.candidate[rows] = level, self.following[rows, node]
        self._reject(rows, level, node)

    def _reject(self, rows: Tensor, level: Tensor, node: Tensor) -> None:
        """Remove the mass of the rejected children ``node`` [M] from r and d at the levels above them."""
        draft = self.draft
        r, d = self._remains(rows, level, node)
        c = self.weight[rows, level]
        self.left[rows, level], mass = residual(r, draft.spread(d, rows, node, r.shape[-1]), c)
        self.weight[rows, level] = (mass / (mass + 1 - c)).nan_to_num(nan=1.0)
        self.fresh[rows, level] = False
        if self.drawn is not None:
            # The other sequences do not read d again.
            m = ((self.candidate[rows] >= 0) & ~self.stays[rows, node]).nonzero().squeeze(-1)
            d[m, draft.columns[rows[m], node[m]]] = 0.0
            d = d[m]
            self.drawn[rows[m], level[m]] = d / d.sum(-1, keepdim=True)

    def _remains(self, rows: Tensor, level: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of r [M, V] and d [M, Vd] as of the test of the children ``node`` [M]."""
        fresh, here = self.fresh[rows, level], self.row[rows, level]
        if bool(fresh.all()):
            return self.p[rows, here], self.draft.q_at(rows, node)
        r = self.left[rows, level]
        r[fresh] = self.p[rows[fresh], here[fresh]]
        if self.drawn is None:
            return r, self.draft.q_at(rows, node)
        d, whole = self.drawn[rows, level], fresh | self.stays[rows, node]
        d[whole] = self.draft.q_at(rows[whole], node[whole])
        return r, d
