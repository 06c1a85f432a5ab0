"""What is asked of an engine, however fast it decodes, and how long it would be busy with that at other speeds.

The number of requests in an engine goes up when clients send some, at rates that belong to the traffic: those of users
who wait for an answer before they ask again are high only while few are there, those of many independent ones are
always the same. It goes down as fast as the engine decodes. With the rates up as they were seen, and any seconds a
token in the place of those that were, the shares of time in which so many requests are there follow from the flow
across each number: what goes up across it comes down again. This is the flow-equivalent server of operational analysis
(Denning and Buzen, "The Operational Analysis of Queueing Network Models", ACM Computing Surveys 10(3), 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WINDOW_SECONDS = 300.0
"""Of the past that is looked at, the nearest the most."""

QUEUE = 4
"""Requests that are told apart, for each that is decoded at once: beyond, a longer queue changes nothing."""

_HUGE = 1e100


@dataclass(frozen=True)
class Demand:
    """When requests come, and how long their answers are.

    Attributes:
        arrivals: how often in a second the number of requests goes up from one to another while it is the first, as
            (from, to, rate). A number of which nothing is said is like the one below it.
        answer: tokens of an answer.
        reading: seconds of the engine that go into prompts for each token of an answer.
    """

    arrivals: tuple[tuple[int, int, float], ...]
    answer: float
    reading: float

    def seconds_a_token(self, decoding: Sequence[float]) -> float:
        """Busy seconds of the engine for each token of an answer, prompts included.

        Args:
            decoding: seconds a token while 1, 2, ... requests are there; no more than these are ever looked at.

        Raises:
            ValueError: ``decoding`` is empty.
        """
        if not decoding:
            raise ValueError("decoding says nothing of any number of requests")
        most = len(decoding)
        up: dict[int, list[tuple[int, float]]] = {}
        for start, to, rate in self.arrivals:
            up.setdefault(start, []).append((to - start, rate))
        jumps = [(1, 1.0)]
        # crossing[n]: what goes up across n - 1 | n, by the time in which fewer than n are there.
        crossing = [0.0] * (most + 1)
        time, tokens, share = 0.0, 0.0, 1.0
        for number in range(1, most + 1):
            jumps = up.get(number - 1, jumps)
            for more, rate in jumps:
                for across in range(number, min(number - 1 + more, most) + 1):
                    crossing[across] += share * rate
            each = decoding[number - 1] + self.reading
            share = crossing[number] * self.answer * each
            time += share
            tokens += share / each
            if share > _HUGE:
                crossing = [one / _HUGE for one in crossing]
                time, tokens, share = time / _HUGE, tokens / _HUGE, share / _HUGE
        return time / tokens if tokens else decoding[0] + self.reading


@dataclass(frozen=True)
class Workload:
    """What an engine does for the sequences of one drafter's domain.

    Attributes:
        share: of the time, in which the engine is busy for them.
        demand: of all domains together.
        rounds: seconds of a round in which 1, 2, ... streams each draft a chain of 0, 1, 2, ... tokens; of more streams
            as many decode at once as are listed.
        uptake: seconds of a core that a new version of a drafter took on average: to read, check and stage it, and
            while rounds waited for the swap.
        calls: seconds of a call of the drafter in a round of 1, 2, ... streams, where it drafts beside recall: rounds
            are those of both, with calls as often as they were made lately. Empty where it drafts alone.
        reading: seconds in which a drafter that drafts reads prompts, for each token of an answer.
    """

    share: float
    demand: Demand
    rounds: tuple[tuple[float, ...], ...]
    uptake: float = 0.0
    calls: tuple[float, ...] = ()
    reading: float = 0.0

    def busy(self, nodes: Sequence[float], lengths: Sequence[float], called: Sequence[float] = ()) -> float:
        """Busy seconds a token where drafts of so many ``nodes`` for each stream give ``lengths`` tokens per round.

        These are means over rounds, the first of them without drafts; streams draft as many as give the most. How
        probable a token is the drafter says when it is asked for one: a round with drafts takes what one token for each
        stream takes, at least. Beside recall it is ``called`` in such a share of the rounds, in none if that is empty.
        """
        calls = np.array(self.calls or (0.0,) * len(self.rounds))
        rounds, drafted = self._rounds, np.asarray(nodes, dtype=float)
        last = rounds.shape[1] - 1
        place = np.where(drafted > 0, np.minimum(np.maximum(drafted, 1.0), last), 0.0)
        below = place.astype(int)
        low, high = rounds[:, below], rounds[:, np.minimum(below + 1, last)]
        seconds = low + (place - below) * (high - low) + calls[:, None] * (np.asarray(called) if len(called) else 0.0)
        streams = np.arange(1, len(rounds) + 1)[:, None]
        each = seconds / np.asarray(lengths) / streams + self.reading * (drafted > 0)
        decoding: list[float] = each.min(1).tolist()
        decoding += decoding[-1:] * ((QUEUE - 1) * len(decoding))
        return self.demand.seconds_a_token(decoding)

    @cached_property
    def _rounds(self) -> np.ndarray:
        """[streams, 1 + depth]."""
        return np.array(self.rounds)
