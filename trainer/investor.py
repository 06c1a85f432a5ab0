"""Whether to train now: the learner's value at the traffic that replicas report, at the price of the moment."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from redis.exceptions import RedisError

from osd.config import Settings
from osd.demand import WINDOW_SECONDS, Workload
from osd.learning.gate import GateDecision
from osd.learning.online import Learner
from osd.learning.value import Investment
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.runtime.device import cores
from trainer.capacity import Capacity

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_GATHER_SECONDS = 1.0
_SELDOM_SECONDS = 3.0  # where training costs more than it saves: a look takes some 10 ms of a core
_RARE_SECONDS = 8.0  # where it would not be cheaper in a moment without requests either
_SOON_SECONDS = 0.1  # where such a moment is waited for
_SPAN = 0.2  # seconds of an observation at least: replicas report every tenth of one
_MEMORY = 120.0  # seconds of forwards after which 1 / e of what was seen is left
_DOUBT = 0.5  # seconds of forwards, half of them beside training, that say it takes nothing
_FIRST_SECONDS = 1.0  # that the first report counts for

Tell = Callable[[Investment], None]


@dataclass(frozen=True)
class Worth:
    """What a version is expected to bring, in seconds of a core.

    Attributes:
        saving_rate: saved in each second, against the version in service.
        horizon: seconds for which that is expected to stay.
        uptake: what all replicas together need to take it up.
        price: of one of these at the moment.
    """

    saving_rate: float
    horizon: float
    uptake: float
    price: float

    @property
    def pays(self) -> bool:
        """Whether it saves more than taking it up costs; what costs nothing pays."""
        return not self.price * self.uptake or self.saving_rate * self.horizon > self.price * self.uptake

    def figures(self) -> dict[str, float]:
        """The numbers for a manifest."""
        return {
            "saving_rate": round(self.saving_rate, 6),
            "horizon": round(self.horizon, 1),
            "uptake_seconds": round(self.uptake, 3),
        }


class Investor:
    """Decides for one domain, once a second, on the next slice of learning.

    While no request runs a CPU second costs ``trainer.price_idle``; beside requests ``trainer.price``, for itself and
    for what it was measured to take from their rounds. Beside them it trains where that pays and moments without any
    are too rare to wait for. As long as no replica has said what is asked of it, training goes on: there is nothing to
    reckon with. ``told`` hears of each decision that differs from the one before, and of the first one after each gate.
    """

    def __init__(
        self, settings: Settings, loads: ReplicaLoads, capacity: Capacity, slowing: Slowing, told: Tell
    ) -> None:
        self._settings, self._loads, self._capacity = settings, loads, capacity
        self._slowing, self._told = slowing, told
        self._threads = cores(settings.engine.threads)
        self._workloads: list[Workload] | None = None
        self._typical = TypicalRounds()
        self._looked_at: float | None = None
        self._verdict: tuple[bool, int] | None = None
        self._decided: tuple[tuple[float, bool, int], Investment] | None = None

    def next_slice(self, learner: Learner) -> Investment | None:
        """The decision; None as long as there is nothing to reckon with.

        It stays for a second, until a gate, or until requests come or end: asking costs next to nothing.
        """
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at >= _LOOK_SECONDS:
            if self._looked_at is not None:
                learner.value.horizon.passed(now - self._looked_at)
            self._looked_at = now
            self._look()
        if self._workloads is None:
            return None
        trainer, beside = self._settings.trainer, self._capacity.beside_requests
        moment = (self._looked_at, beside, learner.next_candidate)
        if self._decided is not None and self._decided[0] == moment:
            return self._decided[1]
        price = self._price * (1 + self._threads * self._slowing.per_second) if beside else self._price
        whole = trainer.threads * trainer.workers
        pace = whole * (trainer.duty if beside else 1.0)
        investment = learner.value.invest(self._workloads, price, self._threads, pace, self._price * self._uptake)
        if beside:
            cheaper = price - trainer.price_idle
            investment = investment.or_later(self._threads, cheaper, self._capacity.idle, whole)
        verdict = (investment.pays, learner.next_candidate)
        if verdict != self._verdict:
            self._verdict = verdict
            self._told(investment)
        self._decided = moment, investment
        return investment

    @property
    def decided(self) -> Investment | None:
        """The last decision, None before the first."""
        return None if self._decided is None else self._decided[1]

    @property
    def waits(self) -> bool:
        """Whether it waits for a moment without requests, as it was asked just now: nothing else is missing."""
        asked = self._looked_at is not None and time.monotonic() - self._looked_at < 2 * _LOOK_SECONDS
        return asked and self.decided is not None and self.decided.waits

    def patience(self, awaited: bool) -> float:
        """Seconds from one look at the stream to the next where nothing is trained on; less if it is ``awaited``."""
        if self.waits:
            return _SOON_SECONDS
        if awaited or self.decided is None or self.decided.pays:
            return _GATHER_SECONDS
        trainer = self._settings.trainer
        return _SELDOM_SECONDS if trainer.price_idle < trainer.price else _RARE_SECONDS

    def worth(self, learner: Learner, decision: GateDecision) -> Worth | None:
        """What a candidate is expected to save and to take; None while the traffic is not known."""
        if self._workloads is None or decision.candidate is None or decision.baseline is None:
            return None
        before, after = decision.baseline.length_beside_recall, decision.candidate.length_beside_recall
        rate = learner.value.traffic(self._workloads).saving_rate(before, after) * self._threads
        return Worth(rate, learner.value.horizon.seconds, self._uptake, self._price)

    @property
    def _price(self) -> float:
        """Of a second of a core at the moment."""
        trainer = self._settings.trainer
        return trainer.price if self._capacity.beside_requests else trainer.price_idle

    @property
    def _uptake(self) -> float:
        """Seconds of a core that a version takes all replicas that have drafted for the domain."""
        return sum(one.uptake for one in self._workloads or ())

    def _look(self) -> None:
        try:
            replicas = self._loads.workloads()
        except RedisError as error:
            logger.debug("what is asked of replicas cannot be read, what was known stays: %s", error)
            return
        if replicas:
            domain = self._settings.domain
            mine = {name: workloads[domain] for name, workloads in replicas.items() if domain in workloads}
            self._workloads = self._typical.of(mine, time.monotonic())


class Slowing:
    """A running straight line through observations: how much longer forwards take than at rest, by how much trains.

    One observation is what passes between two looks: seconds of the replicas' forwards, the seconds of the same at
    rest, and how many cores trained meanwhile. Whatever slows forwards always, such as longer contexts, is
    in the line's beginning and not in its slope. The slope times what was trained is what the replicas lost.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float, float, float] | None = None
        self._sums = [0.0] * 5  # of weights, share, ratio, share ratio, share share
        self._lost = self._trained = 0.0

    @property
    def slope(self) -> float:
        """Seconds of forwards lost in each second of them at rest, for each core that trains beside it."""
        weight, share, ratio, both, square = self._sums
        if not weight:
            return 0.0
        spread = square - share**2 / weight
        return max((both - share * ratio / weight) / (spread + _DOUBT / 4), 0.0)

    @property
    def per_second(self) -> float:
        """Seconds of the engine lost by each CPU second of training beside requests, lately."""
        return self._lost / self._trained if self._trained else self.slope

    def observe(self, loads: Iterable[ReplicaLoad], trained: float, now: float) -> float:
        """Take a look at ``now``, when training has computed ``trained`` CPU seconds; the engines' seconds lost."""
        forwards, rest = 0.0, 0.0
        for load in loads:
            forwards, rest = forwards + load.forward_seconds, rest + load.rest_seconds
        last = self._last
        if last is not None and now - last[0] < _SPAN:
            return 0.0
        self._last = (now, forwards, rest, trained)
        if last is None:
            return 0.0
        passed, forwards, rest, trained = (new - old for new, old in zip(self._last, last, strict=True))
        if rest <= 0 or forwards <= 0 or trained < 0:  # nothing ran, or a replica came or went
            return 0.0
        share = trained / passed
        lost = rest * share * self.slope
        kept = math.exp(-rest / _MEMORY)
        seen = (1.0, share, forwards / rest, share * forwards / rest, share**2)
        self._sums = [kept * known + rest * new for known, new in zip(self._sums, seen, strict=True)]
        self._lost, self._trained = kept * self._lost + lost, kept * self._trained + trained
        return lost


@dataclass(frozen=True)
class _Seen:
    """Sums over ``seconds`` until ``at``, the nearest the most: [streams, 1 + depth] of rounds, [streams] of calls."""

    at: float
    seconds: float
    rounds: np.ndarray
    calls: np.ndarray


class TypicalRounds:
    """Averages over minutes of what each replica reports of the cost of its rounds and draft calls.

    A cost model follows the machine within seconds. What a better drafter saves is a small difference of such costs.
    """

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._seen: dict[str, _Seen] = {}

    def of(self, reported: Mapping[str, Workload], now: float) -> list[Workload]:
        """What is ``reported`` by replica, with the averages up to ``now``; others are forgotten."""
        seen = {name: self._with(self._seen.get(name), workload, now) for name, workload in reported.items()}
        self._seen = seen
        return [
            replace(
                workload,
                rounds=tuple(map(tuple, (seen[name].rounds / seen[name].seconds).tolist())),
                calls=tuple((seen[name].calls / seen[name].seconds).tolist()),
            )
            for name, workload in reported.items()
        ]

    def _with(self, before: _Seen | None, workload: Workload, now: float) -> _Seen:
        rounds, calls = np.array(workload.rounds), np.array(workload.calls)
        if before is None or (before.rounds.shape, before.calls.shape) != (rounds.shape, calls.shape):
            return _Seen(now, _FIRST_SECONDS, _FIRST_SECONDS * rounds, _FIRST_SECONDS * calls)
        passed = now - before.at
        kept = math.exp(-passed / WINDOW_SECONDS)
        sums = (kept * old + passed * new for old, new in ((before.rounds, rounds), (before.calls, calls)))
        return _Seen(now, kept * before.seconds + passed, *sums)
