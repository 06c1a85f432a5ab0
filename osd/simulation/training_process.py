"""A trainer: it takes turns among its domains and trains where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import simpy
from simpy.events import ProcessGenerator

from osd.config import Settings, TrainersAssumed
from osd.demand import Workload
from osd.learning.value import Investment
from osd.simulation.knowledge import SimulatedVersion
from osd.simulation.trainee import Trainee

_LOOK_SECONDS = 60.0
"""A decision to train is looked at again after so long, and after each gate; the product does it every second."""


class Service(Protocol):
    """What a trainer sees of the replicas."""

    def spare(self, trainer: int) -> float:
        """The share of its time that it may train now."""
        ...

    def beside_requests(self, trainer: int) -> bool:
        """Whether any request runs on its machine, which it would take time from."""
        ...

    def workload(self, domain: int) -> Workload | None:
        """What is asked of one replica, None before it is known."""
        ...

    def idle(self, trainer: int) -> float:
        """The share of the time in which no request runs on its machine, whose replicas are busy independently."""
        ...


class TrainingProcess:
    """Trains the domains it has, one at a time: the one whose next slice is worth most, as ``DomainScheduler``.

    Each ``tick`` seconds it does what fits in, as far as the service leaves it time.
    """

    def __init__(
        self,
        number: int,
        env: simpy.Environment,
        settings: Settings,
        assumed: TrainersAssumed,
        trainees: dict[int, Trainee],
        service: Service,
        speed: float,
        cores: int,
        publish: Callable[[SimulatedVersion], None],
    ) -> None:
        """Train at ``speed`` tokens a second of a core; all replicas together have so many ``cores``."""
        self._number = number
        self._env, self._settings, self._assumed = env, settings, assumed
        self._trainees, self._service, self._publish = trainees, service, publish
        self._speed, self._cores = speed, cores
        self._decided: dict[int, tuple[float, bool, Investment | None]] = {}
        self._spent = dict.fromkeys(trainees, 0.0)
        self._owed = 0.0  # of a gate that is not over
        self.seconds = self.using = 0.0
        """CPU seconds of micro-steps and gates so far, and those of a second at present."""

    def run(self, tick: float) -> ProcessGenerator:
        """The process, without end."""
        threads = self._settings.trainer.threads
        while True:
            room = tick * threads * self._service.spare(self._number)  # it does not see at once who comes
            yield self._env.timeout(tick)
            for trainee in self._trainees.values():
                trainee.value.horizon.passed(tick)
            self.using = self._work(room) / tick if room else 0.0

    def _work(self, room: float) -> float:
        """Do what fits into so many CPU seconds; those that were used."""
        used = 0.0
        while used < room:
            if self._owed:
                part = min(self._owed, room - used)
                self._owed -= part
                self.seconds += part
                used += part
                continue
            domain = self._next()
            if domain is None:
                break
            trainee = self._trainees[domain]
            tokens = min((room - used) * self._speed, max(trainee.candidate_due - trainee.trained, 0.0))
            seconds = tokens / self._speed
            trainee.learn(tokens, seconds)
            self.seconds += seconds
            self._spent[domain] += seconds
            used += seconds
            if trainee.due:
                self._owed += self._assumed.gate_seconds
                del self._decided[domain]
                version = trainee.judge(self._assumed.gate_seconds)
                if version is not None:
                    self._publish(version)
        return used

    def _next(self) -> int | None:
        """The domain whose next slice is worth most, None where none pays."""
        best: tuple[float, float, int] | None = None
        for domain, trainee in self._trainees.items():
            if not trainee.ready:
                continue
            investment = self._decide(domain, trainee)
            if investment is not None and investment.missing:
                continue
            rank = (-investment.worth if investment else 0.0, self._spent[domain], domain)
            best = min(best or rank, rank)
        return None if best is None else best[2]

    def _decide(self, domain: int, trainee: Trainee) -> Investment | None:
        beside, now = self._service.beside_requests(self._number), self._env.now
        at, was_beside, known = self._decided.get(domain, (now - _LOOK_SECONDS, beside, None))
        if now - at < _LOOK_SECONDS and was_beside == beside:
            return known
        workload, trainer = self._service.workload(domain), self._settings.trainer
        investment = None
        if workload is not None:
            # A machine of its own is paid whether it trains or not.
            price = 0.0 if self._assumed.dedicated else trainer.price_idle
            pace = float(trainer.threads)
            if beside:
                price, pace = trainer.price * (1 + self._cores * self._assumed.slowing), pace * trainer.duty
            investment = trainee.value.invest([workload], price, self._cores, pace)
            if beside:
                cheaper, idle = price - trainer.price_idle, self._service.idle(self._number)
                investment = investment.or_later(self._cores, cheaper, idle, trainer.threads)
        trainee.pays = investment is None or investment.pays
        self._decided[domain] = (now, beside, investment)
        return investment


def spread(domains: Sequence[float], trainers: int) -> list[list[int]]:
    """Domains by trainer: those that are asked for most first, each to the trainer that has least."""
    shares: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(trainers)]
    for domain in sorted(range(len(domains)), key=lambda one: (-domains[one], one)):
        least = min(range(trainers), key=lambda one: shares[one][0])
        shares[least] = (shares[least][0] + domains[domain], [*shares[least][1], domain])
    return [mine for _, mine in shares]
