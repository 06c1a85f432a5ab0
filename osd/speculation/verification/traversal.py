"""Traversal verification of trees."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

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

    def verify(self, draft: DraftBatch, p: Tensor, noise: Noise) -> Verdict:
        """See ``Rule.verify``; keeps one row of the vocabulary per depth and touches it only at a rejection."""
        batch, vocabulary = len(p), p.shape[-1]
        first, following = draft.links()
        deepest = int(draft.depths().max()) if draft.tokens.numel() else 0
        sequences = torch.arange(batch, device=p.device)
        here = torch.zeros(batch, dtype=torch.int64, device=p.device)  # the row of p that a sequence stands on
        depth = torch.zeros_like(here)
        candidate = first[:, 0]  # the next child to judge, -1 when all are rejected
        done = torch.zeros(batch, dtype=torch.bool, device=p.device)
        # The state of each node on the way from the root, by depth. r and d are p and q while ``fresh``.
        weight = p.new_ones(batch, deepest + 1)
        fresh = torch.ones(batch, deepest + 1, dtype=torch.bool, device=p.device)
        left = p.new_empty(batch, deepest + 1, vocabulary)
        drawn = draft.q.new_empty(batch, deepest + 1, draft.q.shape[-1])

        while not done.all():
            down = (candidate >= 0).nonzero().squeeze(-1)
            up = ((candidate < 0) & ~done).nonzero().squeeze(-1)
            if len(down):
                node, level = candidate[down], depth[down]
                token, column, new = draft.tokens[down, node], draft.columns[down, node], fresh[down, level]
                r = torch.where(new, p[down, here[down], token], left[down, level, token])
                d = torch.where(new, draft.q[draft.q_row[down, node], column], drawn[down, level, column])
                weight[down, level + 1] = (weight[down, level] * r / d).clamp(max=1)
                fresh[down, level + 1] = True
                here[down], depth[down], candidate[down] = node + 1, level + 1, first[down, node + 1]
            if len(up):
                passed = (here[up] == 0) | noise.rows(up).accept(
                    weight[up, depth[up]].masked_fill(here[up] == 0, 1.0), Purpose.ACCEPT, here[up] - 1
                )
                done[up[passed]] = True
                self._reject(draft, p, up[~passed], (here, depth, candidate), (weight, fresh, left, drawn), following)

        after = torch.where(fresh[sequences, depth][:, None], p[sequences, here], left[sequences, depth])
        return Verdict(draft.path_of(here - 1), depth, noise.pick(after, Purpose.RESIDUAL, here))

    @staticmethod
    def _reject(
        draft: DraftBatch,
        p: Tensor,
        rows: Tensor,
        place: tuple[Tensor, Tensor, Tensor],
        state: tuple[Tensor, Tensor, Tensor, Tensor],
        following: Tensor,
    ) -> None:
        """Go back from the nodes that sequences ``rows`` stand on to their parents and update these."""
        if not len(rows):
            return
        here, depth, candidate = place
        weight, fresh, left, drawn = state
        node, level = here[rows] - 1, depth[rows] - 1
        above = draft.parents[rows, node] + 1
        new = fresh[rows, level].nonzero().squeeze(-1)
        start, at = rows[new], level[new]
        left[start, at] = p[start, above[new]]
        drawn[start, at] = draft.q_at(start, node[new])
        fresh[start, at] = False
        c, d = weight[rows, level], drawn[rows, level]
        left[rows, level], mass = residual(left[rows, level], draft.spread(d, p.shape[-1]), c)
        weight[rows, level] = (mass / (mass + 1 - c)).nan_to_num(nan=1.0)
        if draft.draw is Draw.WITHOUT_REPLACEMENT:
            d[torch.arange(len(rows), device=p.device), draft.columns[rows, node]] = 0.0
            drawn[rows, level] = d / d.sum(-1, keepdim=True)
        here[rows], depth[rows], candidate[rows] = above, level, following[rows, node]
