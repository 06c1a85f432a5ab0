"""What every growth policy takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from osd.drafting.worth import Bill
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import DraftBatch, Draw, TreeBuilder

SecondsByShare = Callable[[float], Mapping[int, float]]
"""Given how many sequences share a forward of the target: its seconds, by the rows that each of them has in it."""


@dataclass(frozen=True)
class DraftOutcome:
    """What became of a draft: the ``parents`` of its nodes and the ``path`` of those that were kept.

    ``estimates`` are those by which the growth policy placed its nodes, where it gave any; ``drawn`` says that the
    output was, else that the most probable tokens were taken.
    """

    parents: Sequence[int]
    path: Sequence[int]
    estimates: Sequence[float] = ()
    drawn: bool = False


@dataclass(frozen=True)
class Reach:
    """How far a drafter sees whose rows in the last forward of the target said it all.

    ``tokens`` are those of the longest path of each sequence, and ``rows`` what each of them takes in a forward.
    """

    tokens: Sequence[int]
    rows: int


class Expander(Protocol):
    """A drafter as a growth policy sees it: next-token logits for nodes of the trees that are growing."""

    @property
    def support(self) -> Tensor | None:
        """[Vd] target ids of the draft vocabulary, None when it is the whole vocabulary."""
        ...

    @property
    def levels(self) -> int | None:
        """Tokens of the longest path that it can draft, None without end; deeper nodes must not be asked about."""
        ...

    @property
    def reach(self) -> Reach | None:
        """How far it sees in each sequence; None where that is as far as ``levels`` in all of them."""
        ...

    @property
    def block(self) -> int:
        """Tokens of a path that come of one call: chains end where they cost another."""
        ...

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """One forward of the drafter.

        Args:
            builder: the trees so far.
            rows: [M] sequences.
            nodes: [M] the nodes to continue, ROOT or a node whose parent was expanded by an earlier call.

        Returns:
            [M, Vd] logits of the token after each node.
        """
        ...

    def acceptance(self) -> Tensor:
        """[M] how probably the target accepts the tokens of the nodes that the last call asked about.

        It is judged from the drafter's states after these tokens; a drafter without a trained head says 1/2.
        """
        ...


class Growth(ABC):
    """A way to grow drafts.

    It may look at tokens that were drawn and are kept, never at the token about to be drawn, and keeps every token that
    it drew. A subclass says whatever differs from the values here, in its class or for each object.
    """

    name: ClassVar[str]
    draws: frozenset[Draw]
    """Every way in which it may choose siblings."""
    max_nodes: int
    """Nodes of the largest tree that it grows."""
    chains: bool = False
    """Whether no node ever gets a second child."""
    fixed_width: bool = False
    """Whether the number of children of a node is settled before the first of them is drawn."""
    stops_below: float | None = None
    """The probability of a token below which its chain ends, None where that is not all that decides: greedy drafts of
    such a chain need nobody between two tokens."""
    stops_above: float | None = None
    """The probability that a token read so far is rejected, as an acceptance head says it, above which a chain ends,
    None where no head decides: ``Expander.acceptance`` is not asked."""
    by_worth: ClassVar[bool] = False
    """Whether drafts are as large as pays in each round, of all its sequences together: nobody plans them before."""

    @property
    def rule(self) -> str:
        """The verification rule that suits it, where none is asked for."""
        if self.chains:
            return "chain"
        if Draw.DETERMINISTIC in self.draws:
            return "naive"
        return "greedy_multidraft" if Draw.TOP_THEN_DRAWN in self.draws else "traversal"

    @property
    def first_limit(self) -> int:
        """Nodes of a request's first draft at most."""
        return self.max_nodes

    def next_limit(self, limit: int, drafted: int, accepted: int) -> int:
        """Nodes of a request's next draft at most, after one with ``limit`` and what came of it."""
        return self.max_nodes  # which may have changed since

    def rider_rows(self, depth: int) -> int | None:
        """Rows that a drafter's own may take in a forward beside a draft of so many levels at most; None for any."""
        return None

    def observe(self, drafts: Sequence[DraftOutcome], seconds: SecondsByShare) -> bool:
        """Learn from the drafts of a round.

        Args:
            drafts: what became of each.
            seconds: what a forward of the target takes.

        Returns:
            Whether drafts have another shape from now on.
        """
        return False

    def forget(self) -> None:
        """Expect another drafter from now on."""
        return

    def grow_paying(
        self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor, bill: Bill
    ) -> DraftBatch:
        """The same where the drafts of a round are as large as pays; whoever plans nothing draws as ``grow`` does."""
        return self.grow(expand, sampling, noise, limits)

    @abstractmethod
    def grow(self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor) -> DraftBatch:
        """Draw the drafts of one round.

        Args:
            expand: the drafter.
            sampling: the settings that also make the target's p.
            noise: of this round.
            limits: [B] int64, the nodes that each sequence may have at most; 0 drafts nothing.
        """
        ...


def deepest(expand: Expander, depth: int) -> int:
    """The tokens of the longest path where a policy would draft ``depth``."""
    return depth if expand.levels is None else min(depth, expand.levels)


def reaches(expand: Expander, limits: Tensor, depth: int) -> Tensor:
    """[B] the tokens of the longest path of each sequence where a policy would draft ``depth``."""
    most = torch.full_like(limits, deepest(expand, depth))
    return most if expand.reach is None else most.minimum(torch.tensor(expand.reach.tokens, device=limits.device))


def expanded(
    builder: TreeBuilder, expand: Expander, sampling: SamplingBatch, rows: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Ask the drafter about ``nodes`` [M] of sequences ``rows`` [M] and keep what it says.

    Returns:
        The places [M] of the distributions in the builder, the distributions [M, Vd] and the logits [M, Vd].
    """
    logits = expand(builder, rows, nodes)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    places, q = builder.new_rows(len(rows), logits.shape[-1], dtype)
    return places, sampling.probabilities(logits, rows, out=q), logits
