"""What training is worth: what a better drafter would save at the present traffic, against what learning it costs.

    length(x) = length(0) + b (1 - exp(-x / t))    tokens per round after x CPU seconds of learning
    G = share (C(before) - C(after)) / C           seconds of the engine saved in each second
    train the next L seconds if  threads (H - L / pace) G > price L

C is the busy seconds of a token at the length in service and the present demand, where each number of streams drafts
tokens down to the chance that gives the most: some of a weak drafter's tokens are sure, and it is these that pay. A
token counts as the requests themselves take it: of a greedy one the drafter's first choice is right or wrong. Beside
recall rounds in which the drafter is called take its calls too, and recall drafts alone where that is cheaper. H is the
seconds for which the traffic is expected to stay as it is. Several L are looked at, and one that pays is enough: a
drafter too weak to be asked at all brings nothing at first. As the curve is concave, this is the rule
``H dG/dx > price / threads`` wherever the first seconds count as well. What was learned since the last gate is paid for
and brings nothing before the next one: L is what is left until then, so that a slice that was begun ends unless much
has changed. One that is not begun has to earn half as much again as it costs: of several guesses the best is looked at,
and that is more often too high than too low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from osd.demand import Workload
from osd.economy.draft_curve import nodes_and_lengths
from osd.learning.evaluation import GateFigures
from osd.learning.gate import GateDecision

SLICE = 30.0
"""CPU seconds of learning between two looks, and before the first candidate."""

_LOOKS = tuple(SLICE * 2**n for n in range(6))
_TIMES = np.geomspace(10.0, 3000.0, 24)
"""CPU seconds t in which a drafter may learn all but 1 / e of what there is."""

GAIN, GAIN_BESIDE_RECALL = 0.8, 0.2
"""Tokens per round expected to be gained by a drafter that nothing is known of, alone and beside recall.

EAGLE gains 0.4 in 9 CPU seconds of unit tests and in 22 of MBPP on a CPU of 2024 (``benchmarks/drafters.md``), in some
times as many on older ones. Of 80 records each of Spider and MBPP that were there from the beginning it learnt 0.80
and 0.39 in 10 CPU seconds and 1.04 and 0.60 in 40, and beside recall 0.07 and 0.16, and 0.12 and 0.26. Three times a
first version of Spider that was published while requests came gained 0.83, 0.47 and 0.60, for 14 to 19 CPU seconds of
all that the trainer did. Tokens per round as gates say them.
"""

_SECONDS, _SPREAD = 12.0, 1.0
"""In how many CPU seconds all of that is expected but 1 / e, and how far their logarithm may be off.

The gain is uncertain by its own size.
"""

_ERROR = 0.01
"""Tokens per round that a gate may be off even where all records say the same."""

_POINTS = 32

_BEGUN, _DAY = 600.0, 86_400.0

_HURDLE = 1.5
"""What a slice has to earn before it is begun, in what it costs."""

_JUDGING = 3.0
"""CPU seconds that gates of a slice are taken for before any was seen."""

_CERTAINTY = 1.6
"""How sure or hopeless a drafter's tokens are: a + b of the beta distribution of the chances that they are accepted.

On Spider 1.5 to 1.8 at each of three depths, for an EAGLE drafter of which 0.18 of the first tokens are accepted and
for one of which 0.55 are (706 positions).
"""


SECOND = 0.5
"""Of trees: where the first choice is right with a chance c, the second is with so much times c (1 - c).

0.48, 0.40 and 0.42 at three depths of an EAGLE of Spider whose first choice is right for 0.58 of the first tokens. With
it and ``_CERTAINTY`` trees are expected to give up to 2.31 tokens per round; they gave 2.30 (30 greedy prompts).
"""


@dataclass(frozen=True)
class Traffic:
    """What is asked of the replicas now, where the drafter gives ``length`` tokens per round in service.

    A drafter of a length is taken for one that is accepted alike, on average, at each of ``depth`` places of a chain,
    and whose ``second`` choices are drafted beside it. Beside recall, which gives ``recalled`` tokens per round, it is
    called in as many rounds as recall leaves positions open, as long as these calls pay.
    """

    workloads: Sequence[Workload]
    depth: int
    length: float
    second: float = 0.0
    recalled: float = 1.0
    _busy: dict[float, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def saving_rate(self, before: float, after: float) -> float:
        """Seconds of an engine that ``after`` tokens per round save in each second, against ``before``."""
        now, was, would = (self._seconds(length) for length in (self.length, before, after))
        shares = [one.share for one in self.workloads]
        return sum(share * (b - a) / n for share, n, b, a in zip(shares, now, was, would, strict=True))

    def _seconds(self, length: float) -> list[float]:
        """Busy seconds a token of each workload; what was reckoned before is not reckoned again."""
        if length not in self._busy:
            nodes, lengths = self._drafts(length)
            called: list[float] = []
            if any(one.calls for one in self.workloads):
                left_open, without, recalled = self._recall_alone
                called = [left_open if drafted else 0.0 for drafted in nodes] + [0.0] * len(without)
                nodes, lengths = nodes + without, lengths + recalled
            self._busy[length] = [one.busy(nodes, lengths, called) for one in self.workloads]
        return self._busy[length]

    @cached_property
    def _recall_alone(self) -> tuple[float, list[float], list[float]]:
        """The share of positions that recall leaves open, and its ``_drafts``."""
        return 1 - alike(self.recalled, self.depth), *self._drafts(self.recalled)

    def _drafts(self, length: float) -> tuple[list[float], list[float]]:
        """Tokens drafted and given in a round, by how probable a drafted one has to be, as deep as any round is."""
        deepest = max((len(seconds) for one in self.workloads for seconds in one.rounds), default=1) - 1
        if not deepest:
            return [0.0], [1.0]
        nodes, lengths = nodes_and_lengths(alike(length, self.depth), deepest, _CERTAINTY, self.second)
        return nodes.tolist(), lengths.tolist()


def alike(length: float, depth: int) -> float:
    """The acceptance, the same at each of ``depth`` places, that gives chains of this expected length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_length(middle, depth) < length else (low, middle)
    return (low + high) / 2


def chain_length(acceptance: float, depth: int) -> float:
    """Tokens per round, the bonus token included, of chains that are accepted alike at each of ``depth`` places."""
    length = 1.0
    for _ in range(depth):
        length = 1 + acceptance * length
    return length


@dataclass(frozen=True)
class Point:
    """A gate: tokens per round gained after so many CPU ``seconds`` of learning, known up to ``error``."""

    seconds: float
    gained: float
    error: float


class LearningCurve:
    """Tokens per round gained, ``b (1 - exp(-x / t))``, as far as the gates tell.

    For each t of a grid, b has a normal distribution that the points sharpen; what the points say of t weighs the grid.
    So a curve without any is what is expected beforehand, and three or more points all but determine it.
    """

    def __init__(self, gain: float = GAIN, seconds: float = _SECONDS, points: Sequence[Point] = ()) -> None:
        """Expect to gain ``gain``, most of it within ``seconds``; ``points`` are what was seen."""
        self.expected_gain, self.expected_seconds = gain, seconds
        self.points: Sequence[Point] = tuple(points)
        self._known = self._posterior()

    def add(self, point: Point) -> None:
        """Take in a gate; of many the latest are kept."""
        self.points = (*self.points, point)[-_POINTS:]
        self._known = self._posterior()

    def gained(self, seconds: float) -> float:
        """Tokens per round expected to be gained after so many seconds in all."""
        weights, gains = self._known
        return float((weights * gains * -np.expm1(-seconds / _TIMES)).sum())

    @property
    def most(self) -> float:
        """All that is expected to be gained in the end."""
        weights, gains = self._known
        return float((weights * gains).sum())

    @property
    def seconds(self) -> float:
        """Within how many seconds all of that but 1 / e."""
        return float(np.exp((self._known[0] * np.log(_TIMES)).sum()))

    def _posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """How probable each t is, and the gain expected with it, never below 0; [times] both."""
        x, y = (np.array([getattr(point, name) for point in self.points]) for name in ("seconds", "gained"))
        variance = np.array([point.error**2 + _ERROR**2 for point in self.points])
        shape = -np.expm1(-x / _TIMES[:, None])  # [times, points]
        prior = self.expected_gain**2
        precision = 1 / prior + (shape**2 / variance).sum(1)
        mean = (self.expected_gain / prior + (shape * y / variance).sum(1)) / precision
        # The evidence: what is left of the squares, and how much room the prior left (Bishop 2006, 3.86).
        left = ((y - mean[:, None] * shape) ** 2 / variance).sum(1) + (mean - self.expected_gain) ** 2 / prior
        off = np.log(_TIMES / self.expected_seconds) / _SPREAD
        log = -0.5 * (left + np.log(precision) + off**2)
        weights = np.exp(log - log.max())
        spread = precision**-0.5
        ratio = mean / spread
        inside = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in ratio])
        gains = mean * inside + spread * np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)  # of max(b, 0)
        return weights / weights.sum(), gains


class Horizon:
    """For how long the traffic is expected to stay as it is: as long again as it has, on average of its alarms.

    It is told what passes, and forgets it within a day: ``(observed + 600) / (alarms + 1)`` seconds, at most a day.
    """

    def __init__(self, observed: float = 0.0, alarms: float = 0.0) -> None:
        self.observed, self.alarms = observed, alarms

    def passed(self, seconds: float) -> None:
        """So many seconds went by."""
        kept = math.exp(-seconds / _DAY)
        self.observed, self.alarms = kept * self.observed + seconds, kept * self.alarms

    def alarm(self) -> None:
        """Acceptance fell."""
        self.alarms += 1

    @property
    def seconds(self) -> float:
        """The seconds expected."""
        return min((self.observed + _BEGUN) / (self.alarms + 1), _DAY)


@dataclass(frozen=True)
class Investment:
    """Whether the next ``seconds`` of learning pay, and all numbers of the decision.

    Attributes:
        pays: whether what they earn is more than they cost; what costs nothing pays.
        seconds: CPU seconds of learning that were looked ahead.
        gain: tokens per round expected to be gained in them.
        saving_rate: seconds of the engine that this saves in each second.
        horizon: seconds for which the traffic is expected to stay.
        price: what a CPU second of training costs, in seconds of a core.
        earns: seconds of a core saved until the horizon.
        costs: seconds of a core, gates and what replicas need to take a version up included.
        begun: CPU seconds of the slice that were learned before, and are paid for.
        waits: whether it pays, but a moment without requests is waited for, see ``or_later``.
    """

    pays: bool
    seconds: float
    gain: float
    saving_rate: float
    horizon: float
    price: float
    earns: float
    costs: float
    begun: float = 0.0
    waits: bool = False

    @property
    def worth(self) -> float:
        """Seconds of a core that each second of the whole slice earns beyond what is still to be paid.

        By what is left of it alone, a slice that is nearly done would be worth more than any other.
        """
        return (self.earns - self.costs) / (self.seconds + self.begun)

    @property
    def missing(self) -> str:
        """Why nothing is to be trained now, "" where it is."""
        if not self.pays:
            return "further training would cost more than it is expected to save"
        return "a moment without requests, in which training costs less" if self.waits else ""

    def or_later(self, threads: int, cheaper: float, idle: float, pace: float) -> Investment:
        """The same beside requests: it waits for a moment without where that saves more than being done later costs.

            threads G < cheaper idle pace

        Both sides are seconds of a core for each second of delay. A CPU second beside requests spares the wait for one
        without; ``cheaper`` is what that costs less, ``idle`` the share of the time in which none runs, and ``pace``
        the CPU seconds of training a second in it.
        """
        return replace(self, waits=self.pays and threads * self.saving_rate < cheaper * idle * pace)

    def figures(self) -> dict[str, Any]:
        """The numbers as JSON, for an event."""
        return {name: value if isinstance(value, bool) else round(value, 6) for name, value in vars(self).items()}


class Value:
    """What is known of a drafter's learning, and what more of it is worth.

    ``seconds`` were learned since the curve began, which it does anew when acceptance falls, and after so many records
    without a gate that nothing older can be relied on. ``length`` is what the drafter in service gives, None before it
    was judged: until then it is taken for one that gives nothing.
    """

    def __init__(self, depth: int, stale: int, second: float = 0.0, gain: float = GAIN) -> None:
        """Of chains of ``depth`` tokens, or of trees whose ``second`` choices are right as in ``Traffic``.

        What gates said is stale after ``stale`` further records; ``gain`` is expected before the first one.
        """
        self._depth, self._stale, self._second, self._gain = depth, stale, second, gain
        self.curve, self.horizon = LearningCurve(gain), Horizon()
        self.seconds = 0.0
        self.length: float | None = None
        self._level, self._unseen = 0.0, 0.0  # gained by what is in service; records since the last gate
        self._gated = 0.0  # ``seconds`` at the last gate
        self._recalled = 1.0
        self._learned, self._judged = 0.0, 0.0  # CPU seconds of all time

    def learned(self, seconds: float) -> None:
        """So many CPU seconds went into micro-steps."""
        self.seconds += seconds
        self._learned += seconds

    def charged(self, seconds: float) -> None:
        """So many CPU seconds went into gates and publishing."""
        self._judged += seconds

    def arrived(self, weight: float = 1.0) -> None:
        """A record came that stands for so many of the traffic."""
        self._unseen += weight
        if self._unseen >= self._stale:
            self._restart((self.curve.most + self._gain) / 2)

    def drifted(self, before: float, now: float) -> None:
        """Acceptance per tested token fell: at least what was lost can be gained again."""
        self.horizon.alarm()
        lost = chain_length(before, self._depth) - chain_length(now, self._depth)
        self.length = max((self.length or 1.0) - lost, 1.0)
        self._recalled = min(self._recalled, self.length)
        self._restart(max(lost, self.curve.most))

    def looked(self, figures: GateFigures) -> None:
        """Take in what the drafter in service gives, with recall and what that gives alone."""
        self.length, self._recalled = figures.length_beside_recall, figures.length_of_recall

    def judged(self, decision: GateDecision) -> None:
        """Take in what a gate said of a candidate beside the drafter in service."""
        if decision.candidate is None or decision.baseline is None:
            return
        candidate, baseline = (side.length_beside_recall for side in (decision.candidate, decision.baseline))
        if not (math.isfinite(candidate) and math.isfinite(baseline)):
            return
        self.looked(decision.baseline)
        self.compared(candidate, baseline, self._depth * decision.kept_error, decision.passed)

    def compared(self, candidate: float, baseline: float, error: float, passed: bool) -> None:
        """Take in both's tokens per round, known up to ``error``; the candidate is in service if it ``passed``."""
        gained = self._level + candidate - baseline
        self.curve.add(Point(self.seconds, gained, error))
        self.length, self._unseen, self._gated = baseline, 0.0, self.seconds
        if passed:
            self.length, self._level = candidate, gained

    def traffic(self, workloads: Sequence[Workload]) -> Traffic:
        """The present ``workloads`` with the drafter in service."""
        return Traffic(workloads, self._depth, self.length or 1.0, self._second, self._recalled)

    def invest(
        self, workloads: Sequence[Workload], price: float, threads: int, pace: float, uptake: float = 0.0
    ) -> Investment:
        """Decide on the next slice.

        Args:
            workloads: what is asked of each replica for this domain at present.
            price: of a CPU second of training, in seconds of a core.
            threads: cores of the engine.
            pace: CPU seconds of training a second.
            uptake: what it costs replicas to take up a version, in seconds of a core.
        """
        traffic, horizon = self.traffic(workloads), self.horizon.seconds
        overhead = (self._judged + _JUDGING) / (self._learned + SLICE)  # of gates and publishing, a second of learning
        begun = self.seconds - self._gated
        hurdle = 1.0 if begun > 0 else _HURDLE

        def look(seconds: float) -> Investment:
            gain = self.curve.gained(self.seconds + seconds) - self._level
            rate = traffic.saving_rate(traffic.length, traffic.length + gain)
            computed = seconds * (1 + overhead)
            earns = threads * max(horizon - computed / pace, 0.0) * max(rate, 0.0)
            costs = price * computed + uptake
            pays = costs == 0 or earns > hurdle * costs
            return Investment(pays, seconds, gain, rate, horizon, price, earns, costs, begun)

        left = [seconds - begun for seconds in _LOOKS if seconds > begun] or [SLICE]
        return max(map(look, left), key=lambda one: (one.pays, one.earns - one.costs))

    def state(self) -> dict[str, Any]:
        """All of it as JSON, for ``resume``."""
        curve = self.curve
        return {
            "expected": [curve.expected_gain, curve.expected_seconds],
            "points": [[point.seconds, point.gained, point.error] for point in curve.points],
            "horizon": [self.horizon.observed, self.horizon.alarms],
            "spent": [self.seconds, self._learned, self._judged],
            "gated": self._gated,
            "served": [self.length, self._level],
            "recalled": self._recalled,
            "unseen": self._unseen,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave.

        Raises:
            KeyError, TypeError, ValueError: it cannot be read; nothing changes.
        """
        gain, seconds = map(float, state["expected"])
        curve = LearningCurve(gain, seconds, [Point(*map(float, point)) for point in state["points"]])
        observed, alarms = map(float, state["horizon"])
        learning, learned, judged = map(float, state["spent"])
        length, level = state["served"]
        recalled, gated = float(state["recalled"]), float(state["gated"])
        self._unseen, self.curve, self.horizon = float(state["unseen"]), curve, Horizon(observed, alarms)
        self.seconds, self._learned, self._judged = learning, learned, judged
        self._gated = gated
        self.length, self._level = None if length is None else float(length), float(level)
        self._recalled = recalled

    def _restart(self, gain: float) -> None:
        """Begin a curve on which ``gain`` is expected, as fast as on the one before."""
        self.curve = LearningCurve(max(gain, _ERROR), self.curve.seconds)
        self.seconds, self._level, self._unseen, self._gated = 0.0, 0.0, 0.0, 0.0
