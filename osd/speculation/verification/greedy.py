"""What every rule does when p has all its mass on one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from osd.speculation.tree import ROOT


class Walk(Protocol):
    """How a draft is verified that was decoded greedily."""

    def __call__(self, tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        """The nodes of a draft that are kept, and the token after them; see ``follow``."""
        ...


def follow(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
    """The nodes of a draft on the path of most probable tokens, and the token after them.

    ``parents`` come before their nodes; ``best`` is the most probable token after the root, then after each node.
    """
    at, path = ROOT, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == best[1 + at]:
            at = node
            path.append(node)
    return path, best[1 + at]
