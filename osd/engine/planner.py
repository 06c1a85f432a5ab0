"""How much each sequence drafts in a round."""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakKeyDictionary

from osd.engine.lanes import Lane
from osd.engine.piece import Piece
from osd.engine.policy import Policy
from osd.engine.round import Drawn, Round
from osd.engine.sequence import Sequence
from osd.engine.shapes import Shapes
from osd.speculation.governor import Drafted, Governor, Ready


class Planner:
    """Limits drafts to what fits and, with a governor, to what pays; what a request asks for itself is not governed.

    Every lane has a governor of its own, because drafters differ in what they get accepted.

    Attributes:
        governor: the one that the lanes' are made of; None governs nothing.
        shapes: reshapes the trees of static shape; None leaves them as they are.
    """

    def __init__(self, policy: Policy, context: int) -> None:
        """Govern the drafts of ``policy``, in slots of ``context`` tokens."""
        self.governor: Governor | None = None
        self.shapes: Shapes | None = None
        self._policy, self._context = policy, context
        self._governors: WeakKeyDictionary[Lane, Governor] = WeakKeyDictionary()
        self._missed: dict[Sequence, int] = {}  # by those whose drafts were planned last

    def plan(self, pieces: list[Piece], running: int) -> None:
        """Set how many nodes each piece may draft; of the ``running`` sequences some still wait with their prompts."""
        for piece in pieces:
            if piece.may_draft:
                s = piece.sequence
                piece.limit = min(s.limit, s.remaining - 1, self._context - len(s.tokens))
        if self.governor is None:
            return
        self._missed = {}
        governed: dict[Lane, list[Piece]] = defaultdict(list)
        for piece in pieces:
            if piece.limit and piece.sequence.lane is not None and piece.sequence.policy is self._policy:
                governed[piece.sequence.lane].append(piece)
        ends = sum(piece.ends for piece in pieces)
        rows = sum(piece.count + piece.limit for piece in pieces)
        rows -= sum(piece.limit for mine in governed.values() for piece in mine)
        for lane, mine in governed.items():
            ready = [Ready(piece.sequence.missed, piece.sequence.remaining) for piece in mine]
            self._missed |= {piece.sequence: one.missed for piece, one in zip(mine, ready, strict=True)}
            nodes = self._governor_of(lane).plan(ready, ends - len(mine), rows, running - ends)
            for piece, most in zip(mine, nodes, strict=True):
                piece.limit = min(piece.limit, most)
                rows += piece.limit

    def learn(self, outcome: Round, report: list[Drawn], seconds: float) -> None:
        """Take in what a round cost and gave."""
        if self.governor is not None and not outcome.recorded:
            self._govern(self.governor, outcome, report, seconds)
        if self.shapes is not None and self._policy.growth in self.shapes.observe(report):
            nodes = self._policy.growth.max_nodes
            for governor in filter(None, (self.governor, *self._governors.values())):
                governor.reshape(nodes)

    def _govern(self, first: Governor, outcome: Round, report: list[Drawn], seconds: float) -> None:
        verifying = seconds - sum(outcome.draft_seconds.values())
        for lane in dict.fromkeys(piece.sequence.lane for piece in outcome.pieces):
            mine = [d for d in report if d.drafted and d.sequence.lane is lane and d.sequence.policy is self._policy]
            drafts = [Drafted(drawn.drafted, drawn.path) for drawn in mine]
            drafting = outcome.draft_seconds.get(lane, 0.0) if lane else 0.0
            governor = self._governor_of(lane) if lane else first
            missed = sum(self._missed[drawn.sequence] for drawn in mine)
            governor.observe(outcome.rows, verifying + drafting, drafting, drafts, missed)
            for drawn in mine:
                drawn.sequence.drafted_in = drawn.sequence.step

    def renew(self, lane: Lane) -> None:
        """Expect another drafter in a lane from now on."""
        if self.shapes is not None:
            self.shapes.renew()
        if lane in self._governors:
            self._governors[lane].renew()

    def _governor_of(self, lane: Lane) -> Governor:
        assert self.governor is not None  # noqa: S101  the caller has looked
        if lane not in self._governors:
            self._governors[lane] = self.governor.beside()
        return self._governors[lane]
