"""Chains whose length follows what was accepted."""

from __future__ import annotations

from typing import ClassVar

from osd.speculation.growth.chain import Chain


class Heuristic(Chain):
    """Draft two tokens more after a round that accepted all, one fewer after any other.

    The policy has no memory: whoever runs the rounds keeps each sequence's depth, starts it at ``start``, passes it
    as a limit and moves it with ``adapt``. Lossless, for a depth depends on past rounds only. The "heuristic"
    schedule of transformers' assisted generation.
    """

    name: ClassVar[str] = "heuristic"

    def __init__(self, start: int, depth: int) -> None:
        """Begin with ``start`` tokens and never draft more than ``depth``."""
        super().__init__(depth)
        if not 1 <= start <= depth:
            raise ValueError(f"start must be between 1 and depth {depth}, not {start}")
        self.start = start

    def adapt(self, depth: int, drafted: int, accepted: int) -> int:
        """The depth of a sequence's next round from that of this one and what came of it.

        A round that drafted nothing changes nothing.
        """
        if not drafted:
            return depth
        return min(max(depth + 2 if accepted == drafted else depth - 1, 1), self.max_nodes)
