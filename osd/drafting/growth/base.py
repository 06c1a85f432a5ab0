"""Interface between growth policies and drafters."""

from __future__ import annotations

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
"""Given how many sequences share a forward of the target: its seconds, by the rows of each sequence."""


@dataclass(frozen=True)
class DraftOutcome:
    """Outcome of a draft: parents and estimates of its nodes, and the ``path`` of kept ones; ``drawn`` if sampled."""

    parents: Sequence[int]
    path: Sequence[int]
    estimates: Sequence[float] = ()
    drawn: bool = False


@dataclass(frozen=True)
class Reach:
    """Depth that a drafter with riders sees: ``tokens`` of the longest path of each sequence.

    ``rows`` is the number of rows in a forward for each of them.
    """

    tokens: Sequence[int]
    rows: int


@dataclass(frozen=True)
class Stop:
    """End of a chain that needs nothing but the drafter: such chains can be drafted without the host.

    A chain ends after a token whose probability is ``below``, or where an acceptance head says that one of the tokens
    read so far is rejected with a probability ``above``.
    """

    below: float = 0.0
    above: float | None = None


@dataclass(frozen=True)
class Budget:
    """Size of the drafts of a step: the most nodes of each sequence, ``limits`` [B] int64, 0 for none.

    With a ``step`` budget nodes have to pay. ``call_seconds`` is then the time of expanding nodes of some sequences,
    given their depth: expanding roots, of depth 0, also reads the tokens that the drafter has missed.
    """

    limits: Tensor
    step: StepBudget | None = None
    call_seconds: Callable[[Sequence[int], int], float] = lambda rows, depth: 0.0


@dataclass(frozen=True)
class PayingTrees:
    """Trees to be grown level by level, as growth ``best_first`` grows them, of sequences that are drawn alike.

    Attributes:
        room: the nodes that each sequence may have; the roots of those with any are asked about.
        levels: of the deepest trees.
        children: of a node that are looked at.
        chances: [depths, ranks, buckets] float64 that a candidate is kept if its parent is.
        firsts: [depths] the same of first children whose estimates are not known yet.
        edges: [buckets - 1] of the drafter's estimates, between two buckets.
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
        """Tokens of the longest path that it drafts, None without a bound; deeper nodes must not be expanded."""
        ...

    @property
    def reach(self) -> Reach | None:
        """Depth that it sees in each sequence; None for ``levels`` in all of them."""
        ...

    @property
    def block(self) -> int:
        """Tokens of a path that come of one call: chains end where they cost another."""
        ...

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Run the drafter once, and return the logits [M, Vd] after ``nodes`` [M] of sequences ``rows`` [M].

        A node is ROOT, or a node of the trees so far whose parent was expanded by an earlier call.
        """
        ...

    def acceptance(self) -> Tensor:
        """[M] probability, by an acceptance head, that the target accepts the nodes expanded last; else 1/2."""
        ...


class Growth(ABC):
    """Policy that places the nodes of draft trees.

    It may look at tokens that were drawn and are kept, never at the token about to be drawn, and keeps every token that
    it drew. A subclass overrides the values below, in its class or in each object.
    """

    name: ClassVar[str]
    draws: frozenset[Draw]
    """Every way in which it may choose siblings."""
    max_nodes: int
    """Nodes of the largest tree."""
    chains: bool = False
    """No node ever gets a second child."""
    fixed_width: bool = False
    """The number of children of a node is settled before the first of them is drawn."""
    stop: Stop | None = None
    """End of its chains, None where the host has to look at each token."""
    by_worth: ClassVar[bool] = False
    """Drafts are as large as pays in each step, for all of its sequences together."""

    @property
    def rule(self) -> str:
        """The verification rule used by default."""
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
        return self.max_nodes  # which may have changed since

    def rider_rows(self, depth: int) -> int | None:
        """Return the most riders beside a draft of ``depth`` levels; None for any number."""
        return None

    def observe(self, drafts: Sequence[DraftOutcome], seconds: SecondsByShare) -> bool:
        """Learn from the drafts of a step, and return whether drafts have another shape from now on."""
        return False

    def forget(self) -> None:
        """Weaken what was learned of a drafter that is replaced."""
        return

    def paying(self, source: Source, sampling: SamplingBatch, budget: Budget) -> PayingTrees | None:
        """Return the trees that ``grow`` would grow node by node, for a source that can grow them in one call."""
        return None

    @abstractmethod
    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: Budget) -> DraftBatch:
        """Draw the drafts of one step; ``sampling`` are the settings that also make the target's p."""


def deepest(source: Source, depth: int) -> int:
    """Return the tokens of the longest path for a policy that would draft ``depth``."""
    return depth if source.levels is None else min(depth, source.levels)


def reaches(source: Source, limits: Tensor, depth: int) -> Tensor:
    """[B] tokens of the longest path of each sequence for a policy that would draft ``depth``."""
    most = torch.full_like(limits, deepest(source, depth))
    return most if source.reach is None else most.minimum(torch.tensor(source.reach.tokens, device=limits.device))


def expanded(
    builder: TreeBuilder, source: Source, sampling: SamplingBatch, rows: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand ``nodes`` [M] of sequences ``rows`` [M] and keep their distributions in the builder.

    Returns the places [M] of the distributions in the builder, the distributions [M, Vd] and the logits [M, Vd].
    """
    logits = source.expand(builder, rows, nodes)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    places, q = builder.new_rows(len(rows), logits.shape[-1], dtype)
    return places, sampling.probabilities(logits, rows, out=q), logits
