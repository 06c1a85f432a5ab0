"""Savings and cost of a simulated deployment: the same traffic without drafts, with drafts, and with training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from osd.config import Scenario, Settings
from osd.engine.planner import MAX_NODES
from osd.simulation.deployment import CurvePoint, SimulationResult
from osd.simulation.draft_curve import draft_curve, uniform_acceptance
from osd.simulation.knowledge import PLAIN, TRAINED, UNTRAINED
from osd.simulation.step_costs import StepCosts

_HOUR, _GIGABYTE, _MEGABYTE = 3600.0, 1e9, 1e6


@dataclass(frozen=True)
class AccountPoint:
    """Cost and savings of training up to a time, in ``seconds`` after the first point."""

    seconds: float
    cost: float
    saved: float


def payback(account: Sequence[AccountPoint]) -> float | None:
    """Return the seconds after which savings stay at least as large as costs until the end, None if they do not."""
    last_short = max((index for index, point in enumerate(account) if point.saved < point.cost), default=0)
    later = account[last_short + 1 :]
    return later[0].seconds if later else None


class ReplicaCapacity:
    """Tokens per second of a replica whose slots are all in use.

    Busy seconds do not measure savings: on a replica that is never idle, faster steps only reduce the number of
    requests that decode together. If n streams get L tokens each per step of s seconds, and each token of an answer
    takes r seconds of prompts, the replica gives ``n / (s / L + n r)`` tokens per second.
    """

    def __init__(self, costs: StepCosts, settings: Settings, scenario: Scenario, plain: SimulationResult) -> None:
        """Compute the seconds of prompts per token from ``plain``, the run without drafts."""
        self._costs, self._domains, self._slots = costs, scenario.domains, settings.engine.slots
        self._reading = plain.work.reading / plain.work.tokens if plain.work.tokens else 0.0

    def tokens_per_second(self, length: float) -> float:
        """Return the speed, given the tokens per step of the longest drafts; ``length`` 1 is plain decoding."""
        depth, slots = self._domains.depth, self._slots
        curve = draft_curve(
            round(100 * uniform_acceptance(length, depth)), depth, self._domains.certainty, self._domains.second
        )
        fits = slots * curve.nodes <= (MAX_NODES if length > 1 else 0)
        seconds = self._costs.seconds(slots, curve.nodes[fits], 0) / curve.lengths[fits]
        return slots / (float(seconds.min()) + slots * self._reading)


@dataclass(frozen=True)
class Bill:
    """Savings and cost over the simulated time, in the currency of the prices.

    Attributes:
        hours: simulated time.
        needed: replicas whose slots the traffic would fill, for each way, on average over the time.
        at_end: replicas needed with the drafters of the end, for each way.
        saved_by_drafts: savings of recall and the first version, compared with plain decoding.
        saved_by_training: additional savings of training.
        trainers: cost of trainers.
        redis_servers: number of Redis servers.
        stores: cost of the Redis servers.
        traffic: cost of bytes written, read and pulled.
        account: cost and savings of training over time.
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
    account: list[AccountPoint]

    @property
    def paid(self) -> float:
        """Cost of training."""
        return self.trainers + self.stores + self.traffic

    @property
    def net(self) -> float:
        """Savings of training minus its cost."""
        return self.saved_by_training - self.paid

    @property
    def payback(self) -> float | None:
        """Payback time of training in seconds, None if it does not pay back."""
        return payback(self.account) if self.account[-1].saved > 0 else None

    def figures(self) -> dict[str, Any]:
        """Return all fields and results for JSON."""
        return asdict(self) | {"paid": self.paid, "net": self.net, "payback": self.payback}

    @classmethod
    def of(cls, settings: Settings, scenario: Scenario, costs: StepCosts, runs: Mapping[str, SimulationResult]) -> Bill:
        """Return the bill of a run for each way."""
        capacity = ReplicaCapacity(costs, settings, scenario, runs[PLAIN])
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
            rate * point.seconds + (0.0 if kept.dedicated else hour * point.training / trained.cores)
            for point in trained.curve
        ]
        hours = trained.seconds / _HOUR
        stores, traffic = servers * hours * prices.store_hour, moved * prices.gigabyte
        share = [point.seconds / trained.seconds * stores + _part(point, trained) * traffic for point in trained.curve]
        account = [
            AccountPoint(point.seconds, cost + more, float(gain))
            for point, cost, more, gain in zip(trained.curve, spent, share, earned, strict=True)
        ]
        return cls(
            hours=hours,
            needed={way: _area(counts) / counts[-1][0] for way, counts in needed.items()},
            at_end={way: counts[-1][1] for way, counts in needed.items()},
            saved_by_drafts=saved,
            saved_by_training=float(earned[-1]),
            trainers=spent[-1],
            redis_servers=servers,
            stores=stores,
            traffic=traffic,
            account=account,
        )


def _part(point: CurvePoint, run: SimulationResult) -> float:
    """Return the share of all bytes that were moved up to a point, estimated by the bytes written."""
    return point.written / run.captured.written if run.captured.written else 0.0


def _needed(capacity: ReplicaCapacity, run: SimulationResult) -> list[tuple[float, float]]:
    """Return seconds and replicas needed at each point of the curve, for the mean traffic."""
    rate = run.work.tokens / run.seconds
    return [(point.seconds, rate / capacity.tokens_per_second(point.length)) for point in run.curve]


def _area(counts: Sequence[tuple[float, float]]) -> float:
    """Return replica seconds; each count applies until the next point."""
    return sum((after - at) * count for (at, count), (after, _) in itertools.pairwise(counts))


def _servers(curve: Sequence[CurvePoint], rate: float) -> int:
    """Return the number of Redis servers of ``rate`` bytes per second for the busiest sixth of the time.

    In shorter periods the random fluctuations of the few simulated replicas would be too large.
    """
    period = max(len(curve) // 6, 1)
    rates = [
        (end.written - begin.written) / (end.seconds - begin.seconds)
        for begin, end in zip(curve, curve[period:], strict=False)
        if end.seconds > begin.seconds
    ]
    return math.ceil(max(rates, default=0.0) / rate - 1e-9)
