"""What an engine is asked for, as it is seen: how many requests are there, for how long, and when further ones come."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from osd.demand import QUEUE, WINDOW_SECONDS, Demand, Workload
from osd.economy.costs import CostModel
from osd.engine.round import Outcome
from osd.engine.savings import PlainRound

_LOOK_SECONDS = 1.0  # between two looks at how plain decoding would fare
_PRIOR = 1.0  # arrivals that every number of requests is taken to have seen, at the rate of them all
_FORGOTTEN = 1e-6  # seconds, or times
_PRIOR_SECONDS = 0.5  # for which drafts are taken to do at a number of requests what they do at one less
_zeros = partial(defaultdict[Any, float], float)


@dataclass
class _Seen:
    """What happened, the nearest the most: seconds and counts by the number of requests that were there."""

    faded: float  # when
    time: defaultdict[int, float] = field(default_factory=_zeros)  # rounds, and nothing to do
    plain: defaultdict[int, float] = field(default_factory=_zeros)  # what plain decoding would have needed for them
    tokens: defaultdict[int, float] = field(default_factory=_zeros)
    jumps: defaultdict[tuple[int, int], float] = field(default_factory=_zeros)
    by_domain: defaultdict[str, float] = field(default_factory=_zeros)  # busy seconds
    answers: float = 0.0
    prompts: float = 0.0  # tokens of their prompts
    reading: float = 0.0
    unshared: float = 0.0

    def fade(self, now: float) -> None:
        """Let all of it matter less, once a second."""
        if now - self.faded < _LOOK_SECONDS:
            return
        kept = math.exp((self.faded - now) / WINDOW_SECONDS)
        self.faded = now
        for counts in (self.time, self.plain, self.tokens, self.jumps, self.by_domain):
            _fade(counts, kept)
        self.answers, self.prompts = kept * self.answers, kept * self.prompts
        self.reading, self.unshared = kept * self.reading, kept * self.unshared


class DemandMeter:
    """Watches the rounds of an engine; see ``osd.demand`` for what is made of it.

    A round belongs to the domains of its sequences by their number. Sequences that asked not to be drafted for belong
    to none: no drafter could save them anything.
    """

    def __init__(self, now: float, slots: int) -> None:
        """Begin at ``now``, in seconds of the clock that all later calls give, for an engine of so many ``slots``."""
        self._slots, self._most = slots, QUEUE * slots
        self._seen = _Seen(now)
        self._ended, self._looked = now, now
        self._there = self._requests = 0
        self._drafters: dict[str, tuple[str, str | None]] = {}  # their kinds, and those of their calls
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
        seen, streams = self._seen, len(outcome.sequences)
        seen.fade(began)
        came, self._requests = asked - self._requests, asked
        before = max(there - self._there, 0)
        seen.time[self._number(self._there)] += _lately(began - self._ended)
        prompts = [len(one.sequence.request.prompt_ids) for one in outcome.sequences if one.sequence.finish]
        ended = len(prompts)
        self._jump(self._there, there)
        self._jump(there - ended, there - ended + came - before)  # who waits for an answer asks after it
        number = self._number(there)
        seen.time[number] += seconds
        seen.plain[number] += sum(plain.each) if streams else seconds
        seen.tokens[number] += sum(one.tokens for one in outcome.sequences)
        seen.answers += ended
        seen.prompts += sum(prompts)
        seen.reading += plain.reading
        if not streams:
            seen.unshared += seconds
        for one in outcome.sequences:
            if (drafter := one.sequence.drafter) is not None:
                seen.by_domain[drafter.domain] += seconds / streams
                self._drafters[drafter.domain] = drafter.kind, drafter.calls
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
        passed, streams = sum(self._time(now).values()), range(1, self._slots + 1)
        found, prompt = {}, round(self._seen.prompts / self._seen.answers)
        for domain, spent in sorted(self._seen.by_domain.items()):
            kind, calls = self._drafters[domain]
            rounds = tuple(costs.chains(kind, count, depth) for count in streams)
            each = () if calls is None else tuple(costs.proposal(calls, count, depth) for count in streams)
            reading = costs.reading(kind, prompt) / demand.answer
            found[domain] = Workload(min(spent / passed, 1.0), demand, rounds, calls=each, reading=reading)
        return found

    def _demand(self, now: float) -> Demand | None:
        """What is asked for; None before the first answer."""
        seen = self._seen
        seen.fade(now)
        time = self._time(now)
        tokens, came = sum(seen.tokens.values()), sum(seen.jumps.values())
        if not (seen.answers and tokens and came):
            return None
        rate = came / sum(time.values())
        jumps = seen.jumps.copy()
        for number in time:
            jumps[number, number + 1] += _PRIOR
        arrivals = tuple(
            (start, to, count / (time.get(start, 0.0) + _PRIOR / rate)) for (start, to), count in sorted(jumps.items())
        )
        return Demand(arrivals, tokens / seen.answers, seen.reading / tokens)

    def _time(self, now: float) -> defaultdict[int, float]:
        """Seconds by the number of requests that were there, up to ``now``."""
        time = self._seen.time.copy()
        time[self._number(self._there)] += _lately(now - self._ended)
        return time

    def _plain_token(self, number: int, costs: CostModel) -> float:
        """Seconds a token of plain decoding while so many requests are there."""
        streams = min(number, self._slots)
        return costs.plain_round(streams) / streams

    def _jump(self, start: int, to: int) -> None:
        start, to = self._number(start), self._number(to)
        if to > start:
            self._seen.jumps[start, to] += 1

    def _number(self, there: int) -> int:
        return min(there, self._most)


def _fade(counts: dict[Any, float], kept: float) -> None:
    for key in list(counts):
        counts[key] *= kept
        if counts[key] < _FORGOTTEN:
            del counts[key]


def _lately(seconds: float) -> float:
    """What so many ``seconds`` that end now count for."""
    return WINDOW_SECONDS * -math.expm1(-max(seconds, 0.0) / WINDOW_SECONDS)
