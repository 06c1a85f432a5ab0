"""A trainer: it takes turns among its domains and trains what their funds cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import simpy
from simpy.events import ProcessGenerator

from osd.config import Settings, TrainersAssumed
from osd.economy.training import decide, forecast
from osd.simulation.knowledge import SimulatedVersion
from osd.simulation.trainee import Trainee


class Service(Protocol):
    """What a trainer sees of the replicas."""

    def spare(self, trainer: int) -> float:
        """The share of its time that it may train now."""
        ...

    def beside_requests(self, trainer: int) -> bool:
        """Whether any request runs on its machine, which it would take time from."""
        ...

    def busy(self, domain: int) -> float:
        """Core seconds that all replicas have computed for a domain."""
        ...

    def gain(self, before: SimulatedVersion, after: SimulatedVersion) -> float:
        """Logarithm of the true speed-up of a version over the one before, at present."""
        ...


class TrainingProcess:
    """Trains the domains it has, one at a time: the one with the largest forecast, as ``DomainScheduler``.

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
        self._covered: set[int] = set()
        self._busy = dict.fromkeys(trainees, 0.0)
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
            for domain, trainee in self._trainees.items():
                busy = self._service.busy(domain)
                trainee.serve(busy - self._busy[domain], self._service.gain)
                self._busy[domain] = busy
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
            seconds, price = tokens / self._speed, self._price
            beside = not self._assumed.dedicated and self._service.beside_requests(self._number)
            trainee.learn(tokens, seconds, price, self._cores * self._assumed.slowing * seconds if beside else 0.0)
            self.seconds += seconds
            self._spent[domain] += seconds
            used += seconds
            if trainee.due:
                self._owed += self._assumed.gate_seconds
                self._covered.discard(domain)
                version = trainee.judge(self._assumed.gate_seconds, price)
                if version is not None:
                    self._publish(version)
        return used

    def _next(self) -> int | None:
        """The domain with the largest forecast, None where no fund covers a slice."""
        best: tuple[float, float, int] | None = None
        for domain, trainee in self._trainees.items():
            if not trainee.ready:
                continue
            if not self._decide(domain, trainee):
                continue
            worth = forecast(trainee.fund, trainee.promised, self._busy[domain] / self._env.now)
            rank = (-worth, self._spent[domain], domain)
            best = min(best or rank, rank)
        return None if best is None else best[2]

    def _decide(self, domain: int, trainee: Trainee) -> bool:
        price = self._price
        decision = decide(trainee.fund, price, self._settings.economy.max_loss, domain in self._covered)
        trainee.begins = decision.begins
        if decision.begins and price:
            self._covered.add(domain)
        else:
            self._covered.discard(domain)
        return decision.begins

    @property
    def _price(self) -> float:
        """Of a CPU second at the moment; a machine of its own is paid whether it trains or not."""
        trainer = self._settings.trainer
        if self._assumed.dedicated:
            return 0.0
        return trainer.price if self._service.beside_requests(self._number) else trainer.price_idle


def spread(domains: Sequence[float], trainers: int) -> list[list[int]]:
    """Domains by trainer: those that are asked for most first, each to the trainer that has least."""
    shares: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(trainers)]
    for domain in sorted(range(len(domains)), key=lambda one: (-domains[one], one)):
        least = min(range(trainers), key=lambda one: shares[one][0])
        shares[least] = (shares[least][0] + domains[domain], [*shares[least][1], domain])
    return [mine for _, mine in shares]
