"""Shapes of static trees: given, or the best for measured acceptance."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from osd.verification.tree import ROOT


def shape_of_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the parents of a tree, given by its nodes' paths of child ranks as in Medusa: (0,), (1,), (0, 0), ...

    Nodes are in order of levels, siblings in order of ranks. Raises ValueError if a path lacks its parent or an earlier
    sibling, or is not unique.
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
    """Return the tree with the most accepted tokens, and their expected number.

    A child of rank k is accepted with probability ``acceptance[k]`` at every node. The tree has at most ``nodes`` nodes
    and ``depth`` levels, both at least 1.
    """
    programme = _Programme(acceptance, nodes, depth)
    # More nodes never accept less, but a depth or rank bound may leave no tree of exactly this size.
    size = max(n for n in range(1, nodes + 1) if math.isfinite(programme.accepted(n)))
    return programme.shape(size), programme.accepted(size)


def expected_tokens(acceptance: Sequence[float], nodes: int, depth: int) -> list[float]:
    """Return the tokens of a step, bonus token included, with the best tree of 0, 1, ... ``nodes`` nodes.

    See ``best_shape``. A size that no tree has repeats the one before.
    """
    programme = _Programme(acceptance, nodes, depth)
    return list(itertools.accumulate((1 + programme.accepted(n) for n in range(nodes + 1)), max))


class _Programme:
    """Sequoia's dynamic programme (Chen et al., NeurIPS 2024), bounded in depth.

    The best tree of n nodes whose root has b children is the best one whose root has b - 1, with a best subtree under
    the b-th child.
    """

    def __init__(self, acceptance: Sequence[float], nodes: int, depth: int) -> None:
        ranks, size = min(len(acceptance), nodes), nodes + 1  # with the root
        share, depth = np.array(acceptance[:ranks]), min(depth, nodes)
        # value[d, b, n]: most tokens, the root counted, of a tree of n nodes, depth d and b children of its root, of
        # which the b-th has taken + 1 nodes under it. No tree has 0 nodes.
        value = np.full((depth + 1, ranks + 1, size + 1), -np.inf)
        taken = np.zeros((depth + 1, ranks + 1, size + 1), dtype=np.int64)
        value[:, 0, 1] = 1.0
        below = np.full((depth, ranks, size + 1), -np.inf)  # what the b-th child gives with m nodes, one depth deeper
        below[:, :, 1] = share
        # By size, for all depths and ranks at once: a tree of n nodes is made of smaller ones.
        for n in range(2, size + 1):
            most = min(ranks, n - 1)
            # [d, b, m]: m = 1.. nodes for the child and n - m for the rest
            options = value[1:, :most, n - 1 : 0 : -1] + below[:, :most, 1:n]
            chosen = options.argmax(-1)
            taken[1:, 1 : most + 1, n] = chosen
            value[1:, 1 : most + 1, n] = np.take_along_axis(options, chosen[..., None], -1)[..., 0]
            best = value[:-1, :, n].max(-1)[:, None]  # [d, 1]
            # 0 times a tree that is not there is nothing either.
            np.multiply(best, share, out=below[:, :, n], where=np.isfinite(best))
        self._depth, self._value, self._taken = depth, value, taken

    def accepted(self, nodes: int) -> float:
        """Return the accepted tokens of the best tree of so many nodes, minus infinity if there is none."""
        return float(self._value[self._depth][:, nodes + 1].max()) - 1

    def shape(self, nodes: int) -> tuple[int, ...]:
        """Return the best tree of so many nodes."""
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

    ``acceptance[d][k]`` is the probability that the candidate of rank k at depth d is right after a right path. No path
    stands before its parent or an earlier sibling.

    Chen et al., "Hardware-aware parallel prompt decoding", 2024 (arXiv 2405.18628).
    """
    found: list[tuple[tuple[int, ...], float]] = []
    pending: list[tuple[float, tuple[int, ...], float]] = []

    def offer(above: tuple[int, ...], share: float, rank: int) -> None:
        depth = len(above)
        if depth < len(acceptance) and rank < len(acceptance[depth]):
            heapq.heappush(pending, (-share * acceptance[depth][rank], (*above, rank), share))

    offer((), 1.0, 0)
    while pending and len(found) < nodes:
        negative, path, above = heapq.heappop(pending)
        found.append((path, -negative))
        offer(path, -negative, 0)
        offer(path[:-1], above, path[-1] + 1)
    return found


def hardware_aware_size(tokens: Sequence[float], seconds: Mapping[int, float]) -> int:
    """Return the number of nodes for the most tokens per second, 0 if drafting does not pay.

    That is the n of the largest ``tau(n) / (L(n) / L(1))`` (Chen et al., 2024, arXiv 2405.18628). A forward of the
    target has one row more than the draft has nodes.

    Args:
        tokens: of a step, bonus token included, with 0, 1, 2, ... nodes.
        seconds: of a forward of the target by its rows, from one row on. They are interpolated; larger sizes are not
            considered.
    """
    if 1 not in seconds or min(seconds.values()) <= 0:
        raise ValueError("seconds must be positive and include a forward of 1 row")
    rows = sorted(seconds)
    last = min(len(tokens), rows[-1])
    costs = np.interp(range(1, last + 1), rows, [seconds[count] for count in rows])
    return int(np.argmax(np.asarray(tokens[:last]) / costs))
