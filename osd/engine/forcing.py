"""Drafts as a grammar has them: tokens that it leaves no choice about, and trees without those that it forbids."""

from __future__ import annotations

from dataclasses import replace

from osd.drafters.session import Tree
from osd.engine.constraint import Constraint, Path
from osd.speculation.tree import ROOT

FORCED = "grammar"
"""The source of tokens that a grammar leaves no choice about."""


def pruned(tree: Tree, constraint: Constraint | None) -> Tree:
    """A tree whose tokens were chosen without chance, without the nodes that a constraint forbids and what hangs there.

    Riders go with their node.
    """
    if constraint is None:
        return tree
    paths: dict[int, Path] = {ROOT: ()}  # of the nodes that stay
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        mask = constraint.allowed(paths[parent]) if parent in paths else None
        if mask is not None and bool(mask[token]):
            paths[node] = (*paths[parent], token)
    nodes = [node for node in paths if node != ROOT]
    if len(nodes) == len(tree.tokens):
        return tree
    numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
    riders: list[int] = []
    for rider, parent in enumerate(tree.rider_parents):
        if parent in numbers:
            numbers[len(tree.tokens) + rider] = len(nodes) + len(riders)
            riders.append(rider)
    return replace(
        tree,
        tokens=[tree.tokens[node] for node in nodes],
        parents=[numbers[tree.parents[node]] for node in nodes],
        sources=[tree.sources[node] for node in nodes],
        rider_tokens=[tree.rider_tokens[rider] for rider in riders],
        rider_parents=[numbers[tree.rider_parents[rider]] for rider in riders],
        estimates=[tree.estimates[node] for node in nodes] if tree.estimates else (),
        orders=[tree.orders[node] for node in nodes] if tree.orders else (),
    )
