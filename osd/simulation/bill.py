"""What a deployment saves and pays: the same traffic without drafts, with them, and with training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from osd.config import Scenario, Settings
from osd.engine.planner import MOST_NODES
from osd.simulation.deployment import Look, Outcome
from osd.simulation.draft_curve import alike, draft_curve
from osd.simulation.knowledge import PLAIN, TRAINED, UNTRAINED
from osd.simulation.round_costs import RoundCosts

_HOUR, _GIGABYTE, _MEGABYTE = 3600.0, 1e9, 1e6


@dataclass(frozen=True)
class Account:
    """What training cost so far and what it saved, ``seconds`` after the first look."""

    seconds: float
    cost: float
    saved: float


def payback(found: Sequence[Account]) -> float | None:
    """Seconds after which the savings stay above the costs until the end, None where they do not."""
    last_short = max((index for index, one in enumerate(found) if one.saved < one.cost), default=0)
    later = found[last_short + 1 :]
    return later[0].seconds if later else None


class Capacity:
    """Tokens a second that a replica gives with all of its slots taken.

    Busy seconds do not tell what drafts save: where a replica is never without a request, faster rounds only decode
    fewer of them together. With n streams a round of s seconds gives each L tokens, beside r seconds of prompts for
    each token of an answer: ``n / (s / L + n r)`` tokens a second.
    """

    def __init__(self, costs: RoundCosts, settings: Settings, scenario: Scenario, plain: Outcome) -> None:
        """``plain`` has what prompts take."""
        self._costs, self._domains, self._slots = costs, scenario.domains, settings.engine.slots
        self._reading = plain.work.reading / plain.work.tokens if plain.work.tokens else 0.0

    def tokens_per_second(self, length: float) -> float:
        """With tokens per round of the longest drafts; 1 is plain decoding."""
        depth, slots = self._domains.depth, self._slots
        curve = draft_curve(round(100 * alike(length, depth)), depth, self._domains.certainty, self._domains.second)
        fits = slots * curve.nodes <= (MOST_NODES if length > 1 else 0)
        seconds = self._costs.seconds(slots, curve.nodes[fits], 0) / curve.lengths[fits]
        return slots / (float(seconds.min()) + slots * self._reading)


@dataclass(frozen=True)
class Bill:
    """Of the time that was simulated, in the currency of the prices.

    Attributes:
        needed: replicas whose slots the traffic would fill in each way, on average over the time.
        at_end: the same with what was learnt in the end.
        saved_by_drafts: what recall and the first version save, against plain decoding.
        saved_by_training: what training saves beyond that.
        trainers: paid for these.
        stores: paid for Redis servers, as many as ``redis_servers``.
        traffic: paid for bytes written, read and pulled.
        account: of training, look by look.
    """

    hours: float
    needed: dict[str, float]
    at_end: dict[str, float]
    saved_by_drafts: float
    saved_by_training: float
    trainers: float
    redis_servers: int
    stores: float
    traffic: float
    account: list[Account]

    @property
    def paid(self) -> float:
        """All that training costs."""
        return self.trainers + self.stores + self.traffic

    @property
    def net(self) -> float:
        """What training saves beyond its cost."""
        return self.saved_by_training - self.paid

    @property
    def payback(self) -> float | None:
        """Seconds after which training has paid, None where it has not."""
        return payback(self.account) if self.account[-1].saved > 0 else None

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return asdict(self) | {"paid": self.paid, "net": self.net, "payback": self.payback}

    @classmethod
    def of(cls, settings: Settings, scenario: Scenario, costs: RoundCosts, runs: Mapping[str, Outcome]) -> Bill:
        """Of one run in each way."""
        capacity = Capacity(costs, settings, scenario, runs[PLAIN])
        prices, trained = scenario.prices, runs[TRAINED]
        hour = prices.replica_hour / _HOUR
        needed = {way: _needed(capacity, run) for way, run in runs.items()}
        saved = hour * (_area(needed[PLAIN]) - _area(needed[UNTRAINED]))
        times = [seconds for seconds, _ in needed[TRAINED]]
        untrained = np.array(needed[UNTRAINED]).T
        less = np.interp(times, untrained[0], untrained[1]) - [count for _, count in needed[TRAINED]]
        earned = hour * np.concatenate([[0.0], np.cumsum(np.diff(times) * less[:-1])])
        servers = _servers(trained.curve, scenario.capture.store_mb_per_second * _MEGABYTE)
        moved = (trained.captured.written + trained.captured.read_bytes + trained.pulled) / _GIGABYTE
        kept = scenario.trainers
        rate = kept.count * prices.trainer_hour / _HOUR if kept.dedicated and trained.way == TRAINED else 0.0
        spent = [
            rate * one.seconds + (0.0 if kept.dedicated else hour * one.training / trained.cores)
            for one in trained.curve
        ]
        hours = trained.seconds / _HOUR
        stores, traffic = servers * hours * prices.store_hour, moved * prices.gigabyte
        share = [one.seconds / trained.seconds * stores + _part(one, trained) * traffic for one in trained.curve]
        account = [
            Account(one.seconds, cost + more, float(gain))
            for one, cost, more, gain in zip(trained.curve, spent, share, earned, strict=True)
        ]
        return cls(
            hours=hours,
            needed={way: _area(found) / found[-1][0] for way, found in needed.items()},
            at_end={way: found[-1][1] for way, found in needed.items()},
            saved_by_drafts=saved,
            saved_by_training=float(earned[-1]),
            trainers=spent[-1],
            redis_servers=servers,
            stores=stores,
            traffic=traffic,
            account=account,
        )


def _part(look: Look, run: Outcome) -> float:
    """Of the bytes moved in all, taken as those written."""
    return look.written / run.captured.written if run.captured.written else 0.0


def _needed(capacity: Capacity, run: Outcome) -> list[tuple[float, float]]:
    """Replicas at each look, for what is asked on average over the time."""
    asked = run.work.tokens / run.seconds
    return [(one.seconds, asked / capacity.tokens_per_second(one.length)) for one in run.curve]


def _area(found: Sequence[tuple[float, float]]) -> float:
    """Replica seconds, each count until the next look."""
    return sum((after - at) * count for (at, count), (after, _) in itertools.pairwise(found))


def _servers(curve: Sequence[Look], rate: float) -> int:
    """Redis servers that take what is written in the busiest sixth of the time.

    Shorter times would count what chance does to the few replicas that stand for all.
    """
    apart = max(len(curve) // 6, 1)
    rates = [
        (two.written - one.written) / (two.seconds - one.seconds)
        for one, two in zip(curve, curve[apart:], strict=False)
        if two.seconds > one.seconds
    ]
    return math.ceil(max(rates, default=0.0) / rate - 1e-9)
