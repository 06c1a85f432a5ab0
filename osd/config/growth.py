"""Which growth policy draws the draft, and how far: one class of settings for each policy.

``osd.drafting.growth`` makes a policy of its settings, by ``kind``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind

Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[tuple[Share, ...], Field(min_length=1, max_length=32, fail_fast=True)]
Depth = Annotated[int, Field(ge=1, le=32, description="tokens of the longest path of a draft")]
Budget = Annotated[int, Field(ge=1, le=256, description="tokens of a draft tree at most")]


class _Growth(Section):
    """What growth policies have in common."""

    judges: ClassVar[bool] = False
    """Whether it asks a head, which has to be trained, about the states of the drafter."""
    governed: bool = Field(default=True, description="draft only as much as raises tokens per second")

    def parameters(self) -> dict[str, Any]:
        """What this kind has for itself."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in ("kind", "governed")}

    @property
    def lookahead(self) -> int:
        """Tokens ahead that drafters are judged for."""
        return 3

    @property
    def longest(self) -> tuple[str, int] | None:
        """The setting that says how many tokens the longest path has, and the number; None where none says it."""
        return None

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: what planning it would say, at once."""
        raise NotImplementedError


class _DeepGrowth(_Growth):
    """Growth that ends at a depth."""

    depth: Depth = 3

    @property
    def longest(self) -> tuple[str, int]:
        """The setting that says how many tokens the longest path has, and the number: the depth."""
        return "depth", self.depth

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: one for each level."""
        return self.depth

    @property
    def lookahead(self) -> int:
        """Tokens ahead that drafters are judged for: the depth."""
        return self.depth


class _BudgetGrowth(_Growth):
    """Growth that ends with a budget."""

    budget: Budget = 16

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: the budget."""
        return self.budget


def _places(widths: Iterable[int], budget: int) -> int:
    """Nodes of a tree whose nodes have so many children, level by level; at most ``budget``."""
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
    """A chain that ends where the drafter doubts."""

    kind: Literal["confidence"] = "confidence"
    eta: float = Field(default=0.5, ge=0, le=1, description="confidence below which a chain ends")


class HeuristicSettings(_DeepGrowth):
    """A chain whose length follows what was accepted."""

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
    """A chain that ends where a trained head expects a rejection."""

    judges: ClassVar[bool] = True
    kind: Literal["acceptance_head"] = "acceptance_head"
    h: float = Field(default=0.7, ge=0, le=1, description="probability of a rejection above which a chain ends")


class DynamicTreeSettings(_BudgetGrowth):
    """A tree that grows where the drafter is most likely to be right."""

    kind: Literal["dynamic_tree"] = "dynamic_tree"
    threshold: float | None = Field(default=None, gt=0, le=1, description="worth below which a tree does not grow")


class StaticTreeSettings(_DeepGrowth):
    """A tree of one shape, the best for acceptance by rank."""

    kind: Literal["static_tree"] = "static_tree"
    budget: Budget = 16
    acceptance: Shares = Field(
        default=(0.6, 0.15, 0.06, 0.03),
        description="how often the child of each rank is accepted, until traffic has told",
    )
    draw: Literal["without_replacement", "iid", "top_then_drawn"] = Field(
        default="without_replacement", description="how siblings are drawn"
    )

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: the budget, or all places that there are."""
        return _places([len(self.acceptance)] * self.depth, self.budget)


class SparseTreeSettings(_BudgetGrowth):
    """A tree of the paths that were right most often."""

    kind: Literal["sparse_tree"] = "sparse_tree"
    ranks: tuple[Shares, ...] = Field(
        default=((0.6, 0.15, 0.06, 0.03), (0.5, 0.12, 0.05), (0.45, 0.1), (0.4, 0.08), (0.35,)),
        min_length=1,
        max_length=32,
        fail_fast=True,
        description="how often the candidate of each rank is right, by depth, until traffic has told",
    )

    @property
    def longest(self) -> tuple[str, int]:
        """The setting that says how many tokens the longest path has, and the number: the depths of the table."""
        return "ranks", len(self.ranks)

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: the budget, or all places that there are."""
        return _places(map(len, self.ranks), self.budget)


class TopKTreeSettings(_DeepGrowth):
    """A tree of the paths that the drafter finds most probable."""

    kind: Literal["top_k_tree"] = "top_k_tree"
    budget: Budget = 16
    top_k: int = Field(default=4, ge=1, le=32, description="tokens of one level of a tree")

    @property
    def largest(self) -> int:
        """Tokens of the largest draft: the budget."""
        return self.budget


class BestFirstSettings(_BudgetGrowth):
    """As many tokens, of all sequences and sources the most probable, as raise tokens per second."""

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
"""The settings of each growth policy, by kind."""

GrowthSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(GROWTH_SETTINGS, "best_first")]
"""Those of one of them."""
