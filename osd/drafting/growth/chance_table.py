"""Counted acceptance rates of candidates by the drafter's estimate, which calibrate these estimates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from osd.drafting.growth.base import DraftOutcome, Growth, SecondsByShare
from osd.verification.tree import ROOT

_EDGES = (0.003, 0.01, 0.03, 0.07, 0.12, 0.2, 0.3, 0.42, 0.55, 0.7, 0.82, 0.92, 0.97)
_DEPTHS, _RANKS = 5, 4
_MEMORY = 0.999  # decay of the counts of a cell with each test
_DOUBT = 8.0  # weight of a prior, in tests
_LOOK = 16  # drafts between two updates of the chances


class ChanceTable:
    """Running acceptance rates of candidates, by depth, rank among siblings, and the drafter's estimate.

    A test is a node with an accepted parent and no accepted earlier sibling; it is passed if the node was accepted. The
    prior of a cell is the rate of all depths, whose prior is the estimate itself. Greedy and drawn drafts are counted
    separately.

    Xiong et al. (WWW 2025) assume that a drafter's probabilities are its chances of acceptance; here they are counted.
    """

    def __init__(self) -> None:
        self._edges = torch.tensor(_EDGES, dtype=torch.float64)
        bounds = torch.tensor([0.0, *_EDGES, 1.0], dtype=torch.float64)
        self._guess = (bounds[1:] + bounds[:-1]) / 2
        self._seen = torch.zeros(2, _DEPTHS, _RANKS, len(self._guess), 2, dtype=torch.float64)  # tests and passes
        self._unread = 0
        self._read()

    def chances(self, drawn: Tensor, depths: Tensor, ranks: Tensor, estimates: Tensor) -> Tensor:
        """Return the chances [M] that candidates pass their tests.

        Args:
            drawn: [M] bool, whether the sequence is sampled.
            depths: [M] of the candidates, 0 for children of the root.
            ranks: [M] among their siblings.
            estimates: [M] of the drafter.
        """
        table, edges = self._chances.to(estimates.device), self._edges.to(estimates.device)
        depths, ranks = depths.clamp(max=_DEPTHS - 1), ranks.clamp(max=_RANKS - 1)
        return table[drawn.long(), depths, ranks, torch.bucketize(estimates.double(), edges, right=True)]

    def first(self, drawn: Tensor, depths: Tensor) -> Tensor:
        """Return the chances [M] of first children with unknown estimates."""
        return self._firsts.to(depths.device)[drawn.long(), depths.clamp(max=_DEPTHS - 1)]

    def chance_at(self, drawn: bool, depth: int, rank: int, estimate: float) -> float:
        """Return ``chances`` of a single candidate, on the host."""
        ranks = self._chances_on_host[drawn][min(depth, _DEPTHS - 1)]
        return ranks[min(rank, _RANKS - 1)][bisect_right(_EDGES, estimate)]

    def first_at(self, drawn: bool, depth: int) -> float:
        """Return ``first`` of a single place, on the host."""
        return self._firsts_on_host[drawn][min(depth, _DEPTHS - 1)]

    def read(self, drawn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return all ``chances`` [depths, ranks, buckets] and ``first`` [depths], and the edges of the buckets."""
        return self._chances[int(drawn)], self._firsts[int(drawn)], self._edges

    def observe(self, draft: DraftOutcome) -> None:
        """Count one draft."""
        buckets = torch.bucketize(torch.tensor(draft.estimates, dtype=torch.float64), self._edges, right=True).tolist()
        for depth, owner in enumerate([ROOT, *draft.path]):
            kept = draft.path[depth] if depth < len(draft.path) else None
            children = [node for node, parent in enumerate(draft.parents) if parent == owner]
            for rank, node in enumerate(children):
                cell = self._seen[int(draft.drawn), min(depth, _DEPTHS - 1), min(rank, _RANKS - 1), buckets[node]]
                cell *= _MEMORY
                cell += torch.tensor([1.0, float(node == kept)], dtype=torch.float64)
                if node == kept:
                    break
        self._unread += 1
        if self._unread >= _LOOK:
            self._read()

    def forget(self) -> None:
        """Decay the counts to the weight of a few tests, for another drafter."""
        tests = self._seen[..., :1]
        self._seen *= _DOUBT / tests.clamp(min=_DOUBT)
        self._read()

    def _read(self) -> None:
        self._unread = 0
        tests, passed = self._seen.unbind(-1)
        usual = (passed.sum(1) + _DOUBT * self._guess) / (tests.sum(1) + _DOUBT)  # [2, ranks, buckets]
        self._chances = (passed + _DOUBT * usual[:, None]) / (tests + _DOUBT)
        self._chances_on_host: list[list[list[list[float]]]] = self._chances.tolist()
        firsts = tests[:, :, 0].sum(-1), passed[:, :, 0].sum(-1)  # [2, depths]
        self._firsts = (firsts[1] + _DOUBT) / (firsts[0] + _DOUBT)
        self._firsts_on_host: list[list[float]] = self._firsts.tolist()


class CountingGrowth(Growth):
    """Growth policy that places nodes by counted chances, and counts the outcomes of its drafts."""

    def __init__(self) -> None:
        self.table = ChanceTable()

    def observe(self, drafts: Sequence[DraftOutcome], seconds: SecondsByShare) -> bool:
        for draft in drafts:
            if draft.estimates:
                self.table.observe(draft)
        return False

    def forget(self) -> None:
        self.table.forget()
