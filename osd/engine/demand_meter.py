"""What an engine is asked for, as it is seen: how many requests are there, for how long, and when further ones come."""

from __future__ import annotations

import math
from typing import TypeVar

from osd.demand import Demand, Workload
from osd.engine.round import Outcome
from osd.engine.savings import PlainRound
from osd.speculation.cost_model import CostModel

WINDOW_SECONDS = 300.0
"""Of the past that is looked at, the nearest the most."""

_LOOK_SECONDS = 1.0  # between two looks at how plain decoding would fare
_QUEUE = 4  # times the slots: so many requests are told apart
_PRIOR = 1.0  # arrivals that every number of requests is taken to have seen, at the rate of them all
_FORGOTTEN = 1e-6  # seconds, or times
_PRIOR_SECONDS = 0.5  # for which drafts are taken to do at a number of requests what they do at one less


_Key = TypeVar("_Key")


class _Seen:
    """What happened, in seconds and counts by the number of requests that were there."""

    def __init__(self) -> None:
        self.time: dict[int, float] = {}  # rounds, and nothing to do
        self.plain: dict[int, float] = {}  # what plain decoding would have needed for these rounds
        self.tokens: dict[int, float] = {}
        self.jumps: dict[tuple[int, int], float] = {}
        self.by_domain: dict[str, float] = {}  # busy seconds
        self.answers = self.reading = self.unshared = self.window = 0.0

    def add(self, other: _Seen, kept: float) -> None:
        """Keep that share of everything, and take in what ``other`` saw."""
        for name, value in vars(self).items():
            more = getattr(other, name)
            if isinstance(value, dict):
                both = {key: kept * value.get(key, 0.0) + more.get(key, 0.0) for key in value.keys() | more.keys()}
                setattr(self, name, {key: one for key, one in both.items() if one > _FORGOTTEN})
            else:
                setattr(self, name, kept * value + more)


class DemandMeter:
    """Watches the rounds of an engine; see ``osd.demand`` for what is made of it.

    A round belongs to the domains of its sequences by their number. Sequences that asked not to be drafted for belong
    to none: no drafter could save them anything.
    """

    def __init__(self, now: float, slots: int) -> None:
        """Begin at ``now``, in seconds of the clock that all later calls give, for an engine of so many ``slots``."""
        self._slots, self._most = slots, _QUEUE * slots
        self._seen, self._new = _Seen(), _Seen()
        self._folded, self._ended, self._looked = now, now, now
        self._there = self._requests = 0
        self._drafters: dict[str, str] = {}
        self.stretch = 1.0
        """Seconds that plain decoding of the same requests, coming as they do, would take, for each that it would take
        with as many of them there as are."""

    def observe(
        self, outcome: Outcome, began: float, seconds: float, plain: PlainRound, there: int, left: int, asked: int
    ) -> None:
        """Take in a round.

        Args:
            outcome: what it did.
            began: when, on the meter's clock.
            seconds: that it took.
            plain: those that plain decoding would have needed.
            there: requests in the engine while it ran, those that wait included.
            left: the same now.
            asked: requests that ever came.
        """
        seen, streams = self._new, len(outcome.sequences)
        came, self._requests = asked - self._requests, asked
        before = max(there - self._there, 0)
        _count(seen.time, self._number(self._there), max(began - self._ended, 0.0))
        ended = sum(bool(one.sequence.finish) for one in outcome.sequences)
        self._jump(self._there, there)
        self._jump(there - ended, there - ended + came - before)  # who waits for an answer asks after it
        number = self._number(there)
        _count(seen.time, number, seconds)
        _count(seen.plain, number, sum(plain.each) if streams else seconds)
        _count(seen.tokens, number, sum(one.tokens for one in outcome.sequences))
        seen.answers += ended
        seen.reading += plain.reading
        if not streams:
            seen.unshared += seconds
        for one in outcome.sequences:
            if (drafter := one.sequence.drafter) is not None:
                _count(seen.by_domain, drafter.domain, seconds / streams)
                self._drafters[drafter.domain] = drafter.kind
        self._there, self._ended = left, began + seconds

    def look(self, now: float, costs: CostModel) -> None:
        """Reckon ``stretch`` anew, once a second."""
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        demand = self._demand(now)
        plain = sum(seconds for number, seconds in self._seen.plain.items() if number)
        if demand is None or plain <= self._seen.unshared:
            return
        busy = sum(seconds for number, seconds in self._seen.time.items() if number)
        decoding = [self._plain_token(number, costs) for number in range(1, self._most + 1)]
        each = [one + demand.reading for one in decoding]
        ratio, actual = busy / plain, []
        for number, seconds in enumerate(each, 1):
            took, would = (of.get(number, 0.0) for of in (self._seen.time, self._seen.plain))
            ratio = (took + _PRIOR_SECONDS * ratio) / (would + _PRIOR_SECONDS)
            actual.append(seconds * ratio - demand.reading)
        would = busy * demand.seconds_a_token(decoding) / demand.seconds_a_token(actual)
        self.stretch = max(would - self._seen.unshared, 0.0) / (plain - self._seen.unshared)

    def workloads(self, now: float, costs: CostModel, depth: int) -> dict[str, Workload]:
        """By domain what its sequences ask for, with chains of up to ``depth`` tokens at present costs."""
        demand = self._demand(now)
        if demand is None:
            return {}
        return {
            domain: Workload(
                min(spent / self._seen.window, 1.0) if self._seen.window else 1.0,
                demand,
                tuple(_chains(costs, self._drafters[domain], streams, depth) for streams in range(1, self._slots + 1)),
                self._most,
            )
            for domain, spent in sorted(self._seen.by_domain.items())
        }

    def _demand(self, now: float) -> Demand | None:
        """What is asked for; None before the first answer."""
        kept = math.exp(-(now - self._folded) / WINDOW_SECONDS)
        self._new.window = WINDOW_SECONDS * (1 - kept)
        self._seen.add(self._new, kept)
        self._new, self._folded = _Seen(), now
        seen = self._seen
        tokens, time = sum(seen.tokens.values()), sum(seen.time.values())
        came = sum(seen.jumps.values())
        if not (seen.answers and tokens and came and time):
            return None
        rate = came / time
        jumps = dict(seen.jumps)
        for number in seen.time:
            _count(jumps, (number, number + 1), _PRIOR)
        arrivals = tuple(
            (start, to, count / (seen.time.get(start, 0.0) + _PRIOR / rate))
            for (start, to), count in sorted(jumps.items())
        )
        return Demand(arrivals, tokens / seen.answers, seen.reading / tokens)

    def _plain_token(self, number: int, costs: CostModel) -> float:
        """Seconds a token of plain decoding while so many requests are there."""
        streams = min(number, self._slots)
        return costs.plain_round(streams) / streams

    def _jump(self, start: int, to: int) -> None:
        start, to = self._number(start), self._number(to)
        if to > start:
            _count(self._new.jumps, (start, to), 1)

    def _number(self, there: int) -> int:
        return min(there, self._most)


def _count(counts: dict[_Key, float], key: _Key, more: float) -> None:
    counts[key] = counts.get(key, 0.0) + more


def _chains(costs: CostModel, drafter: str, streams: int, depth: int) -> tuple[float, ...]:
    """Seconds of a round in which each stream drafts 0, 1, 2, ... tokens."""
    drafting = (
        costs.round(streams * (1 + nodes)) + costs.proposal(drafter, streams, nodes) for nodes in range(1, depth + 1)
    )
    return costs.plain_round(streams), *drafting
