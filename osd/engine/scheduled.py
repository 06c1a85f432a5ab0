"""What is decided about a round before anything is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osd.economy.plan import StepBudget
from osd.engine.sequence import Sequence as Decoding


@dataclass(frozen=True, eq=False)
class ScheduledSequence:
    """What one sequence feeds: ``count`` of its tokens from ``start`` on, then a draft.

    It ``ends`` where the token after these is to be drawn. Tokens that are ``forced`` by its grammar come first in its
    draft.
    """

    sequence: Decoding
    start: int
    count: int
    ends: bool
    forced: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward without a drafter's draft."""
        return self.count + len(self.forced)

    @property
    def end(self) -> int:
        """The place after these tokens."""
        return self.start + self.count

    @property
    def may_draft(self) -> bool:
        """Whether a drafter can continue these: a first token is drawn from the forward of the prompt itself.

        Behind forced tokens only a draft that is as large as pays goes on: node shares tell of others.
        """
        s = self.sequence
        if not s.request.is_exact:  # its tokens leave where a draft would
            return False
        if s.drafter is None or (self.forced and not s.policy.growth.by_worth):
            return False
        return self.ends and self.count == 1 and s.step > 0

    def reads_for(self, other: Decoding) -> bool:
        """Whether the next token of another sequence of the same client is among these, after the same beginning."""
        following = other.fed + 1
        if self.sequence.request.client != other.request.client or not self.start < following <= self.end:
            return False
        if following > min(self.sequence.exact, other.exact):
            return False
        return self.sequence.tokens[:following] == other.tokens[:following]


@dataclass(frozen=True)
class Scheduled:
    """What all sequences feed, and how many nodes drafters may add at most, 0 for whom ``limits`` leaves out.

    ``missed`` of those whose drafts are governed are the tokens that a drafter reads first. ``budget`` is what
    drafts that are as large as pays may spend.
    """

    sequences: Sequence[ScheduledSequence]
    limits: dict[Decoding, int]
    missed: dict[Decoding, int]
    budget: StepBudget | None = None
