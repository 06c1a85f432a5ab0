"""How much to draft, round by round: as much as raises the expected tokens per second, down to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osd.economy.costs import CostModel

_SHARE_OF_PROBES = 0.01  # of the time, for drafts that are not expected to pay
_PROBES_OF_A_NEW_DRAFTER = 16  # that are made whatever they cost
_MEMORY = 0.99  # kept of what is known about a node at each draft that had it
_STEP = 0.1  # of a draft in the running mean of rows beside its nodes
_DOUBT = 2.0  # drafts that the first guess about a node counts for


class Acceptance:
    """How often the i-th node of a draft, in draw order, was on the path that the target kept: running shares.

    A smaller draft of the same policy is the beginning of a larger one, so the shares of the first n nodes are what a
    draft of n nodes is expected to gain, for chains and for trees.
    """

    def __init__(self, nodes: int) -> None:
        self._drafted, self._kept = [0.0] * nodes, [0.0] * nodes

    def observe(self, size: int, kept: Sequence[int]) -> None:
        """Count a draft of ``size`` nodes of which ``kept`` were accepted."""
        for node in range(min(size, len(self._drafted))):
            self._drafted[node] = self._drafted[node] * _MEMORY + 1
            self._kept[node] = self._kept[node] * _MEMORY + (node in kept)

    def forget(self) -> None:
        """Let what comes next outweigh what was seen; it stays the first guess."""
        for node, drafted in enumerate(self._drafted):
            weight = min(1.0, _DOUBT / drafted) if drafted else 0.0
            self._drafted[node] *= weight
            self._kept[node] *= weight

    def resize(self, nodes: int) -> None:
        """Have room for drafts of ``nodes`` nodes; what is known of later ones is kept in case they come back."""
        more = [0.0] * (nodes - len(self._drafted))
        self._drafted, self._kept = self._drafted + more, self._kept + more

    def gains(self) -> list[float]:
        """Tokens that drafts of 0, 1, 2, ... nodes are expected to add to a round."""
        gains, first, before = [0.0], 0.5, 1.0
        for drafted, kept in zip(self._drafted, self._kept, strict=True):
            share = (kept + _DOUBT * before * first) / (drafted + _DOUBT)
            if before == 1.0:
                first = share
            gains.append(gains[-1] + share)
            before = share
        return gains


@dataclass(frozen=True)
class Ready:
    """A sequence that may draft: the tokens that its drafter would first have to read, and those it may still get."""

    missed: int
    left: int


@dataclass(frozen=True)
class Drafted:
    """One sequence's draft in a round: its nodes, which of them the target kept, and its ``riders`` beside them."""

    size: int
    kept: Sequence[int]
    riders: int = 0


class Governor:
    """Plans the drafts of one drafter, round by round, from a cost model and running acceptance.

    Rounds without prompts in which ``ready`` sequences draft n nodes each give ``tokens / (round(rows + ready n) +
    proposal(ready, n))``; the best n sets what a second is worth in tokens. Sequences whose prompts are still being
    read count, because a token that is not drafted now is decoded beside theirs. A sequence whose drafter would first
    have to read, such as its prompt, begins only where what it would lose by decoding plainly to its end is worth more
    than the reading. Of those that have begun, each drafts as many nodes as give the most tokens, less the worth of the
    seconds that they cost: where few have begun or a prompt is read beside them, a draft must earn no less than it
    would in the best of rounds.

    Because nothing is learnt about a drafter that does not draft, a small share of the time goes to probes: one
    sequence drafts as much as it may. The next probe comes when the time for the last one has gone by, so that a long
    time without any is not made up for at once; one more follows a probe that drafted nothing, for there are drafters
    whose first round prepares their next. A new drafter is probed at once.
    """

    def __init__(self, nodes: int, costs: CostModel, kind: str) -> None:
        """Plan drafts of up to ``nodes`` nodes, by the costs of this machine and of a ``kind`` of drafter."""
        self.nodes = nodes
        self.costs, self._kind = costs, kind
        self.acceptance = Acceptance(nodes)
        self._debt = 0.0  # seconds that probes took, less their share of the time since
        self._owed = _PROBES_OF_A_NEW_DRAFTER
        self._probing = False  # in the round that was planned last and not observed yet, at its own expense
        self._riders = 0.0  # rows of the drafter's own for a root and for each node, a running mean

    def plan(self, sequences: Sequence[Ready], others: int, rows: int, coming: int = 0) -> list[int]:
        """How many nodes each of some sequences is to draft at most.

        Args:
            sequences: those that may draft; the one whose drafter missed least is probed.
            others: sequences that get a token in this round without a draft.
            rows: that the target's forward has whatever is drafted.
            coming: sequences that will decode beside these when their prompts have been read.
        """
        ready = len(sequences)
        if ready == 0:
            return []
        gains, sizes = self.acceptance.gains(), range(self.nodes + 1)
        soon = ready + coming
        seconds = [self._cost(soon, nodes, others + soon) or 1.0 for nodes in sizes]  # of a round without prompts
        speed = max((others + soon * (1 + gains[nodes])) / seconds[nodes] for nodes in sizes)
        lost = (speed * seconds[0] - others - soon) / soon  # tokens, by each that is decoded plainly
        begins = [lost * one.left >= speed * self.costs.reading(self._kind, one.missed) for one in sequences]
        drafting = sum(begins)
        best = max(sizes, key=lambda nodes: drafting * gains[nodes] - speed * self._cost(drafting, nodes, rows))
        plan = [best if one_begins else 0 for one_begins in begins]
        self._probing = False
        likely = min(range(ready), key=lambda place: sequences[place].missed)
        if max(plan) < self.nodes and self._may_probe(rows + sum(plan), self.nodes - plan[likely]):
            plan[likely] = self.nodes
        return plan

    def observe(self, seconds: float, draft_seconds: float, drafts: Sequence[Drafted]) -> None:
        """Learn from a round that took so many seconds, of which drafting took ``draft_seconds``."""
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * seconds)
        if self._probing:
            self._debt += draft_seconds
            self._owed += not drafts
            self._probing = False
        for draft in drafts:
            self.acceptance.observe(draft.size, draft.kept)
            self._riders += _STEP * (draft.riders / (1 + draft.size) - self._riders)

    def reshape(self, nodes: int) -> None:
        """Expect drafts of another shape from now on, of up to ``nodes`` nodes."""
        self.nodes = nodes
        self.acceptance.resize(nodes)
        self.acceptance.forget()

    def renew(self) -> None:
        """Expect another drafter from now on."""
        self.acceptance.forget()
        self._owed = _PROBES_OF_A_NEW_DRAFTER

    def _cost(self, ready: int, nodes: int, rows: int) -> float:
        rows += ready * nodes
        if nodes and self._riders:
            rows += round(ready * self._riders * (1 + nodes))
        return self.costs.round(rows) + self.costs.proposal(self._kind, ready, nodes)

    def _may_probe(self, rows: int, more: int) -> bool:
        """Whether a probe of ``more`` rows is due; they are paid for here, its draft when that was timed."""
        if self._owed > 0:
            self._owed -= 1
            return True
        if self._debt > 0:
            return False
        self._debt = max(0.0, self.costs.round(rows + more) - self.costs.round(rows))
        self._probing = True
        return True
