"""How much to draft, round by round: as much as raises the expected tokens per second, down to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SHARE_OF_PROBES = 0.01  # of the time, for drafts that are not expected to pay
_PROBES_OF_A_NEW_DRAFTER = 16  # that are made whatever they cost
_STEP = 0.1  # of a measurement in a running mean
_OUTLIER = 3.0  # times the running mean; a garbage collection must not change the plan
_MEMORY = 0.99  # kept of what is known about a node at each draft that had it
_DOUBT = 2.0  # drafts that the first guess about a node counts for


class Curve:
    """Seconds as a function of a count: running means of what was seen, and straight lines between."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        points = points or {}
        self._counts = [float(count) for count in sorted(points)]  # the mean of each bucket
        self._seconds = [points[count] for count in sorted(points)]

    def observe(self, count: int, seconds: float) -> None:
        """Take one measurement; counts above 8 share a bucket with those that agree in their three highest bits."""
        bucket = _bucket(count)
        place = bisect_left(self._counts, bucket)
        if place < len(self._counts) and _bucket(int(self._counts[place])) == bucket:
            known = self._seconds[place]
            self._seconds[place] += _STEP * (min(seconds, _OUTLIER * known) - known)
            self._counts[place] += _STEP * (count - self._counts[place])
        else:
            self._counts.insert(place, float(count))
            self._seconds.insert(place, seconds)

    def at(self, count: int) -> float:
        """The seconds expected, 0 when nothing was seen; below the smallest count that was seen, those of that one.

        Beyond the largest the last line goes on, and never falls.
        """
        if not self._counts:
            return 0.0
        place = bisect_left(self._counts, count)
        if place == 0 or len(self._counts) == 1:
            return self._seconds[0]
        beyond = place == len(self._counts)
        place = min(place, len(self._counts) - 1)
        below, above = self._counts[place - 1 : place + 1]
        rise = (self._seconds[place] - self._seconds[place - 1]) / (above - below)
        if beyond:
            return self._seconds[place] + max(0.0, rise) * (count - above)
        return self._seconds[place - 1] + rise * (count - below)


def _bucket(count: int) -> int:
    step = 1 << max(0, count.bit_length() - 3)
    return count if count <= 8 else count // step * step


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
    """One sequence's draft in a round: its nodes, and which of them the target kept."""

    size: int
    kept: Sequence[int]


class Governor:
    """Plans the drafts of each round from measured costs and running acceptance.

    Rounds without prompts in which ``ready`` sequences draft n nodes each give ``tokens / (verify(rows + ready n) +
    draft(ready, n))``; the best n sets what a second is worth in tokens. Sequences whose prompts are still being read
    count, because a token that is not drafted now is decoded beside theirs. A sequence whose drafter would first have
    to read, such as its prompt, begins only where what it would lose by decoding plainly to its end is worth more than
    the reading. Of those that have begun, each drafts as many nodes as give the most tokens, less the worth of the
    seconds that they cost: where few have begun or a prompt is read beside them, a draft must earn no less than it
    would in the best of rounds.

    Because nothing is learnt about a drafter that does not draft, a small share of the time goes to probes: one
    sequence drafts as much as it may. The next probe comes when the time for the last one has gone by, so that a long
    time without any is not made up for at once. A new drafter is probed at once.
    """

    def __init__(self, nodes: int, verify: Mapping[int, float] | None = None) -> None:
        """Plan drafts of up to ``nodes`` nodes.

        Args:
            nodes: the largest draft of the growth policy.
            verify: measured seconds of a forward of the target, by its rows.
        """
        self.nodes = nodes
        self._verify = Curve(verify)
        self._draft: dict[int, Curve] = {}  # by the bucket of sequences: seconds a node
        self._read = Curve()  # by the tokens that were missed
        self._acceptance = Acceptance(nodes)
        self._debt = 0.0  # seconds that probes took, less their share of the time since
        self._owed = _PROBES_OF_A_NEW_DRAFTER
        self._probing = False  # in the round that was planned last, at its own expense

    def beside(self) -> Governor:
        """A governor of another drafter of the same kind on the same machine: they share what is measured of costs."""
        other = Governor(self.nodes)
        other._verify, other._draft, other._read = self._verify, self._draft, self._read
        return other

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
        gains, sizes = self._acceptance.gains(), range(self.nodes + 1)
        soon = ready + coming
        seconds = [self._cost(soon, nodes, others + soon) or 1.0 for nodes in sizes]  # of a round without prompts
        speed = max((others + soon * (1 + gains[nodes])) / seconds[nodes] for nodes in sizes)
        lost = (speed * seconds[0] - others - soon) / soon  # tokens, by each that is decoded plainly
        begins = [lost * one.left >= speed * self._reading(one.missed) for one in sequences]
        drafting = sum(begins)
        best = max(sizes, key=lambda nodes: drafting * gains[nodes] - speed * self._cost(drafting, nodes, rows))
        plan = [best if one_begins else 0 for one_begins in begins]
        self._probing = False
        likely = min(range(ready), key=lambda place: sequences[place].missed)
        if max(plan) < self.nodes and self._may_probe(rows + sum(plan), self.nodes - plan[likely]):
            plan[likely] = self.nodes
        return plan

    def observe(
        self, rows: int, seconds: float, draft_seconds: float, drafts: Sequence[Drafted], missed: int = 0
    ) -> None:
        """Learn from a round.

        Args:
            rows: of the target's forward.
            seconds: that the round took.
            draft_seconds: that drafting took of them.
            drafts: of the sequences that drafted.
            missed: tokens that the drafter read first, of a prompt or of rounds without a draft: such a round says what
                reading costs, and nothing of what drafting costs when it goes on.
        """
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * seconds)
        if self._probing:
            self._debt += draft_seconds
        self._verify.observe(rows, seconds - draft_seconds)
        if drafts:
            largest = max(draft.size for draft in drafts)
            if missed:
                drafting = self._drafting(len(drafts), largest)
                self._read.observe(missed, max(0.0, draft_seconds - drafting))
            else:
                curve = self._draft.setdefault(_bucket(len(drafts)), Curve())
                curve.observe(largest, draft_seconds / largest)
        for draft in drafts:
            self._acceptance.observe(draft.size, draft.kept)

    def reshape(self, nodes: int) -> None:
        """Expect drafts of another shape from now on, of up to ``nodes`` nodes."""
        self.nodes = nodes
        self._acceptance.resize(nodes)
        self._acceptance.forget()

    def renew(self) -> None:
        """Expect another drafter from now on."""
        self._acceptance.forget()
        self._owed = _PROBES_OF_A_NEW_DRAFTER

    def _cost(self, ready: int, nodes: int, rows: int) -> float:
        return self._verify.at(rows + ready * nodes) + self._drafting(ready, nodes)

    def _drafting(self, ready: int, nodes: int) -> float:
        """Seconds in which ``ready`` sequences draft ``nodes`` nodes each, having read everything."""
        if not nodes or not self._draft:
            return 0.0
        nearest = min(self._draft, key=lambda seen: abs(seen - _bucket(ready)))
        return self._draft[nearest].at(nodes) * nodes

    def _reading(self, missed: int) -> float:
        return self._read.at(missed) if missed else 0.0

    def _may_probe(self, rows: int, more: int) -> bool:
        """Whether a probe of ``more`` rows is due; they are paid for here, its draft when that was timed."""
        if self._owed > 0:
            self._owed -= 1
            return True
        if self._debt > 0:
            return False
        self._debt = max(0.0, self._verify.at(rows + more) - self._verify.at(rows))
        self._probing = True
        return True
