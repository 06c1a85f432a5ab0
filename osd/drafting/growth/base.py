"""Interface between growth policies and drafters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from osd.economy.plan import StepBudget
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import DraftBatch, Draw, TreeBuilder

SecondsByShare = Callable[[float], Mapping[int, float]]
"""Function from the number of sequences in a forward of the target to its seconds by the rows per sequence."""


@dataclass(frozen=True)
class DraftOutcome:
    """Outcome of a draft: its nodes' parents and estimates, the ``path`` of accepted nodes, and if it was drawn."""

    parents: Sequence[int]
    path: Sequence[int]
    estimates: Sequence[float] = ()
    drawn: bool = False


@dataclass(frozen=True)
class Reach:
    """Depth of a drafter with riders: ``tokens`` of the longest path of each sequence, at ``rows`` rows per token."""

    tokens: Sequence[int]
    rows: int


@dataclass(frozen=True)
class Stop:
    """Rule for the end of a chain that the drafter can evaluate without the host.

    A chain ends after a token with a probability ``below``. It also ends if an acceptance head predicts that a token
    read so far is rejected, with a probability ``above``.
    """

    below: float = 0.0
    above: float | None = None

    def sizes(self, limits: Tensor, logits: Tensor) -> Tensor:
        """Return the sizes [B] of chains up to ``limits`` [B] by ``below``.

        Level k of a chain is the most probable token of ``logits[:, k]`` [B, levels, draft vocabulary].
        """
        if self.below <= 0:
            return limits
        sure = logits.amax(-1) - logits.logsumexp(-1) >= math.log(self.below)
        return limits.minimum(1 + sure[:, :-1].cumprod(-1).sum(-1))


@dataclass(frozen=True)
class DraftBudget:
    """Size of the drafts of a step: the most nodes of each sequence, ``limits`` [B] int64, 0 for none.

    With a ``step`` budget, the value of a node must exceed its price. ``call_seconds`` is then the time of expanding
    nodes of given sequences at a given depth; at depth 0, the roots, it includes reading unread tokens.
    """

    limits: Tensor
    step: StepBudget | None = None
    call_seconds: Callable[[Sequence[int], int], float] = lambda rows, depth: 0.0


@dataclass(frozen=True)
class GrowthPlan:
    """Plan of trees that grow level by level like growth ``best_first``; all sequences are greedy, or none is.

    Attributes:
        room: most nodes of each sequence; the roots of sequences with any are expanded.
        levels: of the deepest tree.
        children: candidates of a node.
        chances: [depths, ranks, buckets] float64, probability that a candidate is accepted if its parent is.
        firsts: [depths] the same for first children with unknown estimates.
        edges: [buckets - 1] bounds of the drafter's estimates between two buckets.
        step: budget of the step.
    """

    room: Sequence[int]
    levels: int
    children: int
    chances: Tensor
    firsts: Tensor
    edges: Tensor
    step: StepBudget


class Source(Protocol):
    """Source of next-token logits for the nodes of growing trees."""

    @property
    def support(self) -> Tensor | None:
        """[Vd] target ids of the draft vocabulary, None for the whole vocabulary."""
        ...

    @property
    def levels(self) -> int | None:
        """Tokens of the longest path, None without a bound; deeper nodes must not be expanded."""
        ...

    @property
    def reach(self) -> Reach | None:
        """Depth of each sequence; None for ``levels`` in all of them."""
        ...

    @property
    def block(self) -> int:
        """Tokens of a path from one call; chains end where the next call would start."""
        ...

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Run the drafter once, and return the logits [M, Vd] after ``nodes`` [M] of sequences ``rows`` [M].

        A node is ROOT, or a node whose parent was expanded by an earlier call.
        """
        ...

    def acceptance(self) -> Tensor:
        """Return an acceptance head's probabilities [M] for the nodes of the last call; 1/2 without a head."""
        ...


class Growth(ABC):
    """Policy that places the nodes of draft trees.

    It may read tokens that were drawn and stay in the tree, never the token of a coming draw, and keeps every drawn
    token. A subclass overrides the values below, in its class or in each object.
    """

    name: ClassVar[str]
    draws: frozenset[Draw]
    """All ways in which it may choose siblings."""
    max_nodes: int
    """Nodes of the largest tree."""
    chains: bool = False
    """Whether no node ever gets a second child."""
    fixed_width: bool = False
    """Whether the number of children of a node is fixed before the first of them is drawn."""
    stop: Stop | None = None
    """Rule for the end of its chains, None if the host must read each token."""
    is_priced: ClassVar[bool] = False
    """Whether the prices of a step determine the size of its drafts, for all sequences together."""

    @property
    def rule(self) -> str:
        """Default verification rule."""
        if self.chains:
            return "chain"
        if Draw.DETERMINISTIC in self.draws:
            return "naive"
        return "greedy_multidraft" if Draw.TOP_THEN_DRAWN in self.draws else "traversal"

    @property
    def first_limit(self) -> int:
        """Most nodes of a request's first draft."""
        return self.max_nodes

    def next_limit(self, limit: int, drafted: int, accepted: int) -> int:
        """Return the most nodes of a request's next draft, after a draft with ``limit``."""
        return self.max_nodes  # which may have changed

    def rider_rows(self, depth: int) -> int | None:
        """Return the most riders of a draft with ``depth`` levels; None without a bound."""
        return None

    def observe(self, drafts: Sequence[DraftOutcome], seconds: SecondsByShare) -> bool:
        """Learn from the drafts of a step, and return whether the shape of later drafts changes."""
        return False

    def forget(self) -> None:
        """Decay the statistics of a drafter that is replaced."""
        return

    def plan_for(self, source: Source, sampling: SamplingBatch, budget: DraftBudget) -> GrowthPlan | None:
        """Return the plan of the trees that ``grow`` would grow, for a source that can grow them in one call."""
        return None

    @abstractmethod
    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        """Return the drafts of one step; ``sampling`` are the settings that also determine the target's p."""


def check_positive(**values: int) -> None:
    """Raise ValueError unless each of ``values`` is at least 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def deepest(source: Source, depth: int) -> int:
    """Return the tokens of the longest path for a policy of up to ``depth`` tokens."""
    return depth if source.levels is None else min(depth, source.levels)


def reaches(source: Source, limits: Tensor, depth: int) -> Tensor:
    """Return the tokens [B] of the longest path of each sequence for a policy of up to ``depth`` tokens."""
    most = torch.full_like(limits, deepest(source, depth))
    return most if source.reach is None else most.minimum(torch.tensor(source.reach.tokens, device=limits.device))


def expanded(
    builder: TreeBuilder, source: Source, sampling: SamplingBatch, rows: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand ``nodes`` [M] of sequences ``rows`` [M], and store their distributions in the builder.

    Returns:
        The places [M] of the distributions in the builder, the distributions [M, Vd] and the logits [M, Vd].
    """
    logits = source.expand(builder, rows, nodes)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    places, q = builder.new_rows(len(rows), logits.shape[-1], dtype)
    return places, sampling.probabilities(logits, rows, out=q), logits
