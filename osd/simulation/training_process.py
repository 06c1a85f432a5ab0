"""Simulated trainer, which trains its domains within their funds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import simpy
from simpy.events import ProcessGenerator

from osd.config import Settings, TrainerAssumptions
from osd.economy.training import decide, forecast
from osd.simulation.knowledge import SimulatedVersion
from osd.simulation.trainee import Trainee


class ReplicaView(Protocol):
    """State of the replicas, as a trainer sees it."""

    def spare(self, trainer: int) -> float:
        """Return the share of its time that the trainer may use now."""
        ...

    def has_requests(self, trainer: int) -> bool:
        """Return whether a request runs on the trainer's machine, so that training slows it."""
        ...

    def busy(self, domain: int) -> float:
        """Return the core seconds of all replicas for a domain."""
        ...

    def gain(self, before: SimulatedVersion, after: SimulatedVersion) -> float:
        """Return the logarithm of the true speed-up from version ``before`` to ``after`` on current traffic."""
        ...


class TrainingProcess:
    """Trainer that works on its domain with the largest forecast, as ``DomainScheduler`` does.

    Every ``tick`` seconds it uses the CPU time that the replicas leave.

    Attributes:
        seconds: CPU seconds of micro-steps and gates.
        using: CPU seconds per second at present.
    """

    def __init__(
        self,
        number: int,
        env: simpy.Environment,
        settings: Settings,
        assumed: TrainerAssumptions,
        trainees: dict[int, Trainee],
        service: ReplicaView,
        speed: float,
        cores: int,
        publish: Callable[[SimulatedVersion], None],
    ) -> None:
        """Prepare the trainer.

        Args:
            number: of the trainer.
            env: of the simulation.
            settings: of the service.
            assumed: assumptions of the scenario.
            trainees: by domain.
            service: the replicas.
            speed: trained tokens per second of a core.
            cores: of all replicas together.
            publish: called with each new version.
        """
        self._number = number
        self._env, self._settings, self._assumed = env, settings, assumed
        self._trainees, self._service, self._publish = trainees, service, publish
        self._speed, self._cores = speed, cores
        self._covered: set[int] = set()
        self._busy = dict.fromkeys(trainees, 0.0)
        self._spent = dict.fromkeys(trainees, 0.0)
        self._gate_left = 0.0  # CPU seconds of a running gate
        self.seconds = self.using = 0.0

    def run(self, tick: float) -> ProcessGenerator:
        """Train without end."""
        threads = self._settings.trainer.threads
        while True:
            room = tick * threads * self._service.spare(self._number)  # arrivals within the tick are not seen
            yield self._env.timeout(tick)
            for domain, trainee in self._trainees.items():
                busy = self._service.busy(domain)
                trainee.serve(busy - self._busy[domain], self._service.gain)
                self._busy[domain] = busy
            self.using = self._work(room) / tick if room else 0.0

    def _work(self, room: float) -> float:
        """Work for up to ``room`` CPU seconds and return the CPU seconds used."""
        used = 0.0
        while used < room:
            if self._gate_left:
                part = min(self._gate_left, room - used)
                self._gate_left -= part
                self.seconds += part
                used += part
                continue
            domain = self._next()
            if domain is None:
                break
            trainee = self._trainees[domain]
            tokens = min((room - used) * self._speed, max(trainee.candidate_due - trainee.trained, 0.0))
            seconds, price = tokens / self._speed, self._price
            slows = not self._assumed.dedicated and self._service.has_requests(self._number)
            lost = self._cores * self._assumed.slowing * seconds if slows else 0.0
            trainee.learn(tokens, seconds, price, self._settings.trainer.price * lost)
            self.seconds += seconds
            self._spent[domain] += seconds
            used += seconds
            if trainee.due:
                self._gate_left += self._assumed.gate_seconds
                self._covered.discard(domain)
                version = trainee.judge(self._assumed.gate_seconds, price)
                if version is not None:
                    self._publish(version)
        return used

    def _next(self) -> int | None:
        """Return the domain with the largest forecast, None if no fund covers a slice."""
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
        trainee.is_funded = decision.begins
        if decision.begins and price:
            self._covered.add(domain)
        else:
            self._covered.discard(domain)
        return decision.begins

    @property
    def _price(self) -> float:
        """Price of a CPU second at present; 0 on a dedicated machine, which costs the same when idle."""
        trainer = self._settings.trainer
        if self._assumed.dedicated:
            return 0.0
        return trainer.price if self._service.has_requests(self._number) else trainer.price_idle


def assign_domains(domains: Sequence[float], trainers: int) -> list[list[int]]:
    """Return the domains of each trainer; in descending order of shares, each goes to the least loaded trainer."""
    shares: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(trainers)]
    for domain in sorted(range(len(domains)), key=lambda number: (-domains[number], number)):
        least = min(range(trainers), key=lambda number: shares[number][0])
        shares[least] = (shares[least][0] + domains[domain], [*shares[least][1], domain])
    return [assigned for _, assigned in shares]
