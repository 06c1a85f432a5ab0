"""Plan of one decoding step, made before any drafter is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osd.economy.plan import StepBudget
from osd.engine.sequence import SequenceState


@dataclass(frozen=True, eq=False)
class ScheduledSequence:
    """Input of one sequence in a step: ``count`` of its tokens from place ``start`` on, and then a draft.

    The step draws the token after them if the input ``ends``. ``forced`` tokens, by the grammar, begin the draft.
    """

    sequence: SequenceState
    start: int
    count: int
    ends: bool
    forced: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Rows of the forward without the tokens of a drafter."""
        return self.count + len(self.forced)

    @property
    def end(self) -> int:
        """Place after the tokens."""
        return self.start + self.count

    @property
    def may_draft(self) -> bool:
        """Whether a drafter may continue the tokens.

        The step that reads the end of the prompt draws the first token without a draft. After forced tokens only priced
        drafts continue, because node shares are measured without forced tokens.
        """
        s = self.sequence
        if not s.request.is_exact:  # tokens of lossy answers leave the target at the layers where drafts would start
            return False
        if s.constraint is not None and not s.constraint.may_draft:
            return False
        if s.drafter is None or (self.forced and not s.policy.growth.is_priced):
            return False
        return self.ends and self.count == 1 and s.step > 0

    def reads_for(self, other: SequenceState) -> bool:
        """Return whether these tokens include the next token of ``other``, after the same text of the same client."""
        end = other.fed + 1
        if self.sequence.request.client != other.request.client or not self.start < end <= self.end:
            return False
        if end > min(self.sequence.exact_tokens, other.exact_tokens):
            return False
        return self.sequence.tokens[:end] == other.tokens[:end]


@dataclass(frozen=True)
class StepPlan:
    """Input of all sequences, and the size limits of their drafts.

    Attributes:
        sequences: inputs.
        limits: maximum number of nodes that a drafter may add, by sequence; 0 for sequences without an entry.
        missed: by sequence whose draft is governed, the number of tokens that the drafter reads first.
        budget: of priced drafts; None if there are none.
        drafts: whether drafters may draft; False while a plain step is measured, None without speculation.
    """

    sequences: Sequence[ScheduledSequence]
    limits: dict[SequenceState, int]
    missed: dict[SequenceState, int]
    budget: StepBudget | None = None
    drafts: bool | None = None
