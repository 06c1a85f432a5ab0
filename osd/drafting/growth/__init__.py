"""Growth policies by name."""

from __future__ import annotations

from collections.abc import Callable

from osd.config import GrowthSettings
from osd.drafting.growth.base import DraftBudget, DraftOutcome, Growth, GrowthPlan, Reach, Source, Stop
from osd.drafting.growth.best_first import BestFirst
from osd.drafting.growth.chain import AcceptanceHeadChain, Chain, Confidence, Heuristic
from osd.drafting.growth.dynamic_tree import DynamicTree
from osd.drafting.growth.sparse_tree import SparseTree
from osd.drafting.growth.static_tree import StaticTree
from osd.drafting.growth.top_k_tree import TopKTree

_CHAINS = (Chain, Confidence, Heuristic, AcceptanceHeadChain)
_TREES = (BestFirst, DynamicTree, StaticTree, SparseTree, TopKTree)
GROWTHS: dict[str, Callable[..., Growth]] = {growth.name: growth for growth in (*_CHAINS, *_TREES)}

__all__ = ["GROWTHS", "DraftBudget", "DraftOutcome", "Growth", "GrowthPlan", "Reach", "Source", "Stop", "make_growth"]


def make_growth(settings: GrowthSettings) -> Growth:
    """Make the growth policy that the settings name."""
    return GROWTHS[settings.kind](**settings.parameters())
