"""Shapes of static trees: given, or the best for measured acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from osd.speculation.tree import ROOT


def shape_of_paths(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The parents of a tree given by its nodes' paths of child ranks, as Medusa writes them: (0,), (1,), (0, 0), ...

    Returns:
        The parent of each node, ROOT for the root's children, level by level with siblings in rank order.

    Raises:
        ValueError: a path lacks its parent or an earlier sibling, or stands twice.
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


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> tuple[tuple[int, ...], float]:
    """The tree that accepts most when a child of rank k is accepted with probability ``acceptance[k]`` everywhere.

    Sequoia's dynamic programme (Chen et al., NeurIPS 2024), bounded in depth: the best tree of n nodes whose root has b
    children is the best one whose root has b - 1, with a best subtree under the b-th child.

    Args:
        acceptance: probability that the child of each rank is the one accepted.
        nodes: draft tokens, at least 1.
        depth: longest path, at least 1.

    Returns:
        The shape as ``shape_of_paths`` returns it, and its expected number of accepted tokens.
    """
    ranks = min(len(acceptance), nodes)
    size = nodes + 1  # with the root
    nothing = -torch.inf
    # value[d][b, n]: most tokens, the root counted, of a tree of n nodes, depth d and b children of its root.
    value = [torch.full((ranks + 1, size + 1), nothing, dtype=torch.float64) for _ in range(depth + 1)]
    taken = [torch.zeros(ranks + 1, size + 1, dtype=torch.int64) for _ in range(depth + 1)]
    for d in range(depth + 1):
        value[d][0, 1] = 1.0
        if not d:
            continue
        below = value[d - 1].amax(0)  # [size + 1] the best subtree of each size
        for b in range(1, ranks + 1):
            gain = acceptance[b - 1] * below[1:]  # of giving m = 1.. nodes to the b-th child
            for n in range(b + 1, size + 1):
                options = value[d][b - 1, 1:n].flip(0) + gain[: n - 1]  # n - m nodes for the rest, m for the child
                best, m = options.max(0)
                value[d][b, n], taken[d][b, n] = best, m + 1
    # More nodes never accept less, but a depth or rank bound may leave no tree of exactly this size.
    n = max(n for n in range(1, size + 1) if torch.isfinite(value[depth][:, n].max()))
    paths: list[tuple[int, ...]] = []
    pending: list[tuple[tuple[int, ...], int, int, int]] = [((), depth, n, int(value[depth][:, n].argmax()))]
    while pending:
        path, d, n_, b = pending.pop()
        while b:
            m = int(taken[d][b, n_])
            child = (*path, b - 1)
            paths.append(child)
            pending.append((child, d - 1, m, int(value[d - 1][:, m].argmax())))
            n_, b = n_ - m, b - 1
    return shape_of_paths(paths), float(value[depth][:, n].max()) - 1
