"""What one sequence feeds in a round, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from osd.engine.sequence import Sequence
from osd.speculation.tree import ROOT


@dataclass
class Piece:
    """``count`` tokens of a sequence from ``start`` on, then its draft.

    Drafting fills ``drafted`` and ``parents``, the token ids of the draft's nodes and the nodes they hang on.
    Packing fills ``row``, the row of the forward that holds the first token, and ``logits_row``, the row of the logits
    after the last one; those after the draft's nodes follow it. Verification fills ``path``, the nodes that are kept,
    and ``token``, which comes after them. Committing fills ``kept``, how many of these tokens the sequence took: fewer
    where it ends among them.
    """

    sequence: Sequence
    start: int
    count: int
    limit: int = 0
    drafted: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    row: int = 0
    logits_row: int = 0
    path: list[int] = field(default_factory=list)
    token: int = -1
    kept: int = 0

    def __post_init__(self) -> None:
        """Settle now whether the token after these is to be drawn: the sequence grows when the round is committed."""
        self.ends = self.start + self.count == len(self.sequence.tokens)

    @property
    def may_draft(self) -> bool:
        """Whether the drafter can continue these: a first token is drawn from the prompt's own forward."""
        return self.ends and self.count == 1 and self.sequence.step > 0 and self.sequence.lane is not None

    def reads_for(self, other: Sequence) -> bool:
        """Whether the next token of another sequence is among these, after the same beginning."""
        end = other.fed + 1
        return self.start < end <= self.start + self.count and self.sequence.tokens[:end] == other.tokens[:end]

    @property
    def rows(self) -> int:
        """Rows of the target's forward."""
        return self.count + len(self.drafted)

    def tested(self) -> list[int]:
        """The draft nodes that stood where the output went on, one a depth: those kept and the next, if any."""
        last = self.path[-1] if self.path else ROOT
        following = [node for node, parent in enumerate(self.parents) if parent == last]
        return self.path + following[:1]
