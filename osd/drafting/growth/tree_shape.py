"""Shapes of static trees: given shapes, and the best shapes for measured acceptance."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from osd.verification.tree import ROOT


def shape_of_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the parents of a tree for its nodes' paths of child ranks as in Medusa: (0,), (1,), (0, 0), ...

    Nodes are ordered by level, siblings by rank.

    Raises:
        ValueError: a path has no parent or no earlier sibling, or is not unique.
    """
    listed = [tuple(path) for path in paths]
    order = sorted(listed, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(order)}
    if len(number) < len(listed) or () in number:
        raise ValueError("tree paths must be different and not empty")
    for path in order:
        *above, rank = path
        if above and tuple(above) not in number:
            raise ValueError(f"tree path {path} has no parent {tuple(above)}")
        if rank < 0 or (rank and (*above, rank - 1) not in number):
            raise ValueError(f"tree path {path} has no sibling of rank {rank - 1}")
    return tuple(number[path[:-1]] if len(path) > 1 else ROOT for path in order)


def paths_of_shape(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the nodes' paths of child ranks; the inverse of ``shape_of_paths``."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(shape):
        rank = sum(other == parent for other in shape[:node])
        paths.append((*(() if parent == ROOT else paths[parent]), rank))
    return paths


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
    """Return the tree with the highest expected number of accepted tokens, and this number.

    A child of rank k is accepted with probability ``acceptance[k]`` at every node. The tree has at most ``nodes`` nodes
    and ``depth`` levels, both at least 1.
    """
    programme = _Programme(acceptance, nodes, depth)
    # More nodes never accept less, but the bounds may not allow a tree of exactly this size.
    size = max(n for n in range(1, nodes + 1) if math.isfinite(programme.accepted(n)))
    return programme.shape(size), programme.accepted(size)


def expected_tokens(acceptance: Sequence[float], nodes: int, depth: int) -> list[float]:
    """Return the expected tokens of a step, with its bonus token, for the best trees of 0, 1, ... ``nodes`` nodes.

    See ``best_shape``. An impossible size has the value of the size before.
    """
    programme = _Programme(acceptance, nodes, depth)
    return list(itertools.accumulate((1 + programme.accepted(n) for n in range(nodes + 1)), max))


class _Programme:
    """Sequoia's dynamic programme (Chen et al., NeurIPS 2024), bounded in depth.

    The best tree of n nodes whose root has b children consists of a best tree whose root has b - 1 children and a best
    subtree under the b-th child.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        ranks, size = min(len(acceptance), nodes), nodes + 1  # with the root
        share, depth = np.array(acceptance[:ranks]), min(depth, nodes)
        # value[d, b, n]: most tokens, with the root, of a tree of n nodes, depth d and b children of its root; the b-th
        # child's subtree has taken + 1 nodes. No tree has 0 nodes.
        value = np.full((depth + 1, ranks + 1, size + 1), -np.inf)
        taken = np.zeros((depth + 1, ranks + 1, size + 1), dtype=np.int64)
        value[:, 0, 1] = 1.0
        below = np.full((depth, ranks, size + 1), -np.inf)  # tokens of the b-th child with m nodes, one level deeper
        below[:, :, 1] = share
        # By size, for all depths and ranks at once: a tree of n nodes consists of smaller trees.
        for n in range(2, size + 1):
            most = min(ranks, n - 1)
            # [d, b, m]: m = 1.. nodes for the child and n - m for the rest
            options = value[1:, :most, n - 1 : 0 : -1] + below[:, :most, 1:n]
            chosen = options.argmax(-1)
            taken[1:, 1 : most + 1, n] = chosen
            value[1:, 1 : most + 1, n] = np.take_along_axis(options, chosen[..., None], -1)[..., 0]
            best = value[:-1, :, n].max(-1)[:, None]  # [d, 1]
            # Impossible trees stay at minus infinity, even with a share of 0.
            np.multiply(best, share, out=below[:, :, n], where=np.isfinite(best))
        self._depth, self._value, self._taken = depth, value, taken

    def accepted(self, nodes: int) -> float:
        """Return the accepted tokens of the best tree of ``nodes`` nodes, minus infinity if there is none."""
        return float(self._value[self._depth][:, nodes + 1].max()) - 1

    def shape(self, nodes: int) -> tuple[int, ...]:
        """Return the best tree of ``nodes`` nodes."""
        value, taken = self._value, self._taken
        paths: list[tuple[int, ...]] = []
        root = int(value[self._depth][:, nodes + 1].argmax())
        pending: list[tuple[tuple[int, ...], int, int, int]] = [((), self._depth, nodes + 1, root)]
        while pending:
            path, d, n, b = pending.pop()
            while b:
                m = int(taken[d][b, n]) + 1
                child = (*path, b - 1)
                paths.append(child)
                pending.append((child, d - 1, m, int(value[d - 1][:, m].argmax())))
                n, b = n - m, b - 1
        return shape_of_paths(paths)


def best_paths(acceptance: Sequence[Sequence[float]], nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """Return at most ``nodes`` paths of child ranks with their probabilities of acceptance, the largest first.

    ``acceptance[d][k]`` is the probability that the target accepts the candidate of rank k at depth d after an accepted
    path. A path follows its parent and its earlier siblings.

    Chen et al., "Hardware-aware parallel prompt decoding", 2024 (arXiv 2405.18628).
    """
    best: list[tuple[tuple[int, ...], float]] = []
    pending: list[tuple[float, tuple[int, ...], float]] = []

    def offer(above: tuple[int, ...], share: float, rank: int) -> None:
        depth = len(above)
        if depth < len(acceptance) and rank < len(acceptance[depth]):
            heapq.heappush(pending, (-share * acceptance[depth][rank], (*above, rank), share))

    offer((), 1.0, 0)
    while pending and len(best) < nodes:
        negative, path, above = heapq.heappop(pending)
        best.append((path, -negative))
        offer(path, -negative, 0)
        offer(path[:-1], above, path[-1] + 1)
    return best


def hardware_aware_size(tokens: Sequence[float], seconds: Mapping[int, float]) -> int:
    """Return the number of nodes with the most tokens per second, 0 if plain decoding is fastest.

    It maximises ``tau(n) / (L(n) / L(1))`` (Chen et al., 2024, arXiv 2405.18628). A forward of the target has one row
    more than the draft has nodes.

    Args:
        tokens: of a step, with its bonus token, for 0, 1, 2, ... nodes.
        seconds: of a forward of the target by its rows, from one row on; they are interpolated. Larger sizes are
            not considered.
    """
    if 1 not in seconds or min(seconds.values()) <= 0:
        raise ValueError("seconds must be positive and include a forward of 1 row")
    rows = sorted(seconds)
    last = min(len(tokens), rows[-1])
    costs = np.interp(range(1, last + 1), rows, [seconds[count] for count in rows])
    return int(np.argmax(np.asarray(tokens[:last]) / costs))
