"""Settings of growth policies, which decide the size and shape of drafts: one class for each policy.

``osd.drafting.growth`` makes a policy from its settings, by ``kind``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind

Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[tuple[Share, ...], Field(min_length=1, max_length=32, fail_fast=True)]
Depth = Annotated[int, Field(ge=1, le=32, description="maximum path length of a draft, in tokens")]
Budget = Annotated[int, Field(ge=1, le=256, description="maximum tokens of a draft tree")]


class _Growth(Section):
    """Settings and properties of all growth policies."""

    needs_head: ClassVar[bool] = False
    """Whether the policy needs a trained acceptance head on the drafter's states."""
    governed: bool = Field(default=True, description="limit drafts to the tokens that raise tokens per second")

    def parameters(self) -> dict[str, Any]:
        """Return the settings of this kind without ``kind`` and ``governed``."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in ("kind", "governed")}

    @property
    def lookahead(self) -> int:
        """Draft depth at which drafters are evaluated, in tokens."""
        return 3

    @property
    def depth_limit(self) -> tuple[str, int] | None:
        """Setting that limits the path length, and the limit in tokens; None without a limit."""
        return None

    @property
    def max_nodes(self) -> int:
        """Size of the largest draft in tokens, computed without a policy."""
        raise NotImplementedError


class _DeepGrowth(_Growth):
    """Settings of a policy with a maximum depth."""

    depth: Depth = 3

    @property
    def depth_limit(self) -> tuple[str, int]:
        return "depth", self.depth

    @property
    def max_nodes(self) -> int:
        return self.depth

    @property
    def lookahead(self) -> int:
        return self.depth


class _BudgetGrowth(_Growth):
    """Settings of a policy with a budget of tokens."""

    budget: Budget = 16

    @property
    def max_nodes(self) -> int:
        return self.budget


def _node_count(widths: Iterable[int], budget: int) -> int:
    """Return the number of nodes of a tree, limited to ``budget``.

    Args:
        widths: the number of children of each node, by level.
        budget: the limit.
    """
    nodes, level = 0, 1
    for width in widths:
        level *= width
        nodes += level
        if nodes >= budget:
            return budget
    return nodes


class ChainSettings(_DeepGrowth):
    """A chain of a fixed length."""

    kind: Literal["chain"] = "chain"


class ConfidenceSettings(_DeepGrowth):
    """A chain that ends when the drafter's confidence is low."""

    kind: Literal["confidence"] = "confidence"
    eta: float = Field(default=0.5, ge=0, le=1, description="confidence below which the chain ends")


class HeuristicSettings(_DeepGrowth):
    """A chain whose length follows the accepted length of earlier drafts."""

    kind: Literal["heuristic"] = "heuristic"
    start: int = Field(
        default=2, ge=1, le=32, validate_default=True, description="tokens of the first draft of a request"
    )

    @field_validator("start")
    @classmethod
    def _within_depth(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("depth", value):
            depth = {"depth": info.data["depth"]}
            raise PydanticCustomError("too_large", "must be at most growth.depth {depth}", depth)
        return value


class AcceptanceHeadSettings(_DeepGrowth):
    """A chain that ends when a trained head expects a rejection."""

    needs_head: ClassVar[bool] = True
    kind: Literal["acceptance_head"] = "acceptance_head"
    h: float = Field(default=0.7, ge=0, le=1, description="rejection probability above which the chain ends")


class DynamicTreeSettings(_BudgetGrowth):
    """A tree that grows at the nodes with the highest path probability."""

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    threshold: float | None = Field(
        default=None, gt=0, le=1, description="path probability below which the tree does not grow"
    )


class StaticTreeSettings(_DeepGrowth):
    """A tree of a fixed shape, optimal for acceptance rates by rank."""

    kind: Literal["static_tree"] = "static_tree"
    budget: Budget = 16
    acceptance: Shares = Field(
        default=(0.6, 0.15, 0.06, 0.03),
        description="initial acceptance rate of the child of each rank, until traffic is measured",
    )
    draw: Literal["without_replacement", "iid", "top_then_drawn"] = Field(
        default="without_replacement", description="how siblings are drawn"
    )

    @property
    def max_nodes(self) -> int:
        return _node_count([len(self.acceptance)] * self.depth, self.budget)


class SparseTreeSettings(_BudgetGrowth):
    """A tree of the paths with the highest measured acceptance."""

    kind: Literal["sparse_tree"] = "sparse_tree"
    ranks: tuple[Shares, ...] = Field(
        default=((0.6, 0.15, 0.06, 0.03), (0.5, 0.12, 0.05), (0.45, 0.1), (0.4, 0.08), (0.35,)),
        min_length=1,
        max_length=32,
        fail_fast=True,
        description="initial acceptance rate of the candidate of each rank, by depth, until traffic is measured",
    )

    @property
    def depth_limit(self) -> tuple[str, int]:
        return "ranks", len(self.ranks)

    @property
    def max_nodes(self) -> int:
        return _node_count(map(len, self.ranks), self.budget)


class TopKTreeSettings(_DeepGrowth):
    """A tree of the most probable paths of the drafter."""

    kind: Literal["top_k_tree"] = "top_k_tree"
    budget: Budget = 16
    top_k: int = Field(default=4, ge=1, le=32, description="tokens per level of the tree")

    @property
    def max_nodes(self) -> int:
        return self.budget


class BestFirstSettings(_BudgetGrowth):
    """The most probable tokens of all sequences and sources, as many as raise tokens per second."""

    kind: Literal["best_first"] = "best_first"
    budget: Budget = 24


_Kinds = (
    BestFirstSettings
    | ChainSettings
    | ConfidenceSettings
    | HeuristicSettings
    | AcceptanceHeadSettings
    | DynamicTreeSettings
    | StaticTreeSettings
    | SparseTreeSettings
    | TopKTreeSettings
)

GROWTH_SETTINGS = by_kind(get_args(_Kinds))
"""Classes of settings by kind of growth policy."""

GrowthSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(GROWTH_SETTINGS, "best_first")]
"""Settings of one growth policy of any kind."""
