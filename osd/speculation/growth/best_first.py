"""Trees of the nodes that are most likely to be kept, as many as pay."""

from __future__ import annotations

from typing import ClassVar

from osd.speculation.growth.top_k_tree import TopKTree


class BestFirst(TopKTree):
    """The most probable paths, of all sequences together as many as raise tokens per second.

    What decides is ``Asked.worth``. A drafter that knows how probably its candidates are kept proposes those that pay;
    of others the whole tree is taken.
    """

    name: ClassVar[str] = "best_first"
    by_worth = True
