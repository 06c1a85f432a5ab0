"""Domains of this trainer: all domains of the service, or its part in the plan of all trainers."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from redis.exceptions import RedisError

from osd.config import Settings
from osd.registry.pointer_file import FencedError
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.trainers import EXPIRY_MS, DomainPlan, TrainerReport, Trainers, TrainersState
from osd.registry.training import TrainingReports
from trainer.assignment import assign, balance, weights
from trainer.capacity import SpareCapacity

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 3.0
"""Averaging time of the capacity, in seconds."""

_GATHER_SECONDS = EXPIRY_MS / 1000
"""Wait for trainers before the first plan: they have started, or reported to a flushed Redis, by then."""

_SETTLED_SECONDS = 10.0
"""Time for which a clearly better plan must exist before domains move."""

_BALANCE_SECONDS = 60.0
"""Shortest time between two moves for balance."""


class Share:
    """Domains of the only trainer of a service: all of them."""

    def __init__(self, domains: Collection[str]) -> None:
        """Create the share of a trainer that has all ``domains``."""
        self._domains = domains

    def domains(self, held: Collection[str]) -> Collection[str]:
        """Return the domains of this trainer, updated once a second; it has the leases of ``held``."""
        return self._domains

    def has_other_trainer(self, domain: str) -> bool | None:
        """Return whether another live trainer has a domain; None when this is not known."""
        return None

    def handle_loss(self, error: FencedError) -> None:
        """Handle the takeover of a domain by another trainer.

        Raises:
            FencedError: always, which ends the trainer.
        """
        raise error

    def close(self) -> None:
        """Release all domains; without other trainers there is nothing to do."""


class Membership(Share):
    """Domains of one of several trainers, which share a plan in Redis. Any trainer may change the plan.

    The domains of a dead trainer go at once to the trainer with the most capacity. Domains move between live trainers
    only if the balance has been clearly better for ten seconds, and at most once a minute. A wrong plan is safe: a
    trainer computes only for domains whose lease it has. While Redis is down every trainer keeps its domains.
    """

    def __init__(
        self, settings: Settings, redis_url: str, domains: Collection[str],
        machine: str | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Join the trainers of ``domains``; ``machine`` names the machine of this trainer, None the local one."""
        self.name = secrets.token_hex(8)
        super().__init__(domains)
        self._clock = clock
        self._trainers, self._reports = Trainers(redis_url), TrainingReports(redis_url)
        self._loads = ReplicaLoads(redis_url, machine)
        self._capacity = SpareCapacity(self._loads, settings.trainer, time.process_time)
        self._room, self._looked_at = 1.0, clock()
        self._state: TrainersState | None = None
        self._uneven_since: float | None = None
        self._current: list[str] = []

    def domains(self, held: Collection[str]) -> Collection[str]:
        self._measure()
        try:
            self._trainers.report(self.name, TrainerReport(tuple(sorted(held)), self._room))
            self._state = now = self._trainers.state()
            plan = self._next_plan(now)
            if plan != now.plan and not self._trainers.replace(now, plan):
                return self._current  # another trainer changed the plan first; the next call reads that plan
        except RedisError as error:
            logger.debug("the plan of the trainers cannot be read, this trainer keeps its domains: %s", error)
            self._state = None
            return self._current
        domains = [domain for domain in self._domains if plan.trainers.get(domain) == self.name]
        if domains != self._current:
            logger.info("domains of this trainer by the plan: %s", ", ".join(domains) or "none")
        self._current = domains
        return domains

    def has_other_trainer(self, domain: str) -> bool | None:
        now = self._state
        if now is None:
            return None
        return any(domain in report.domains for name, report in now.reports.items() if name != self.name)

    def handle_loss(self, error: FencedError) -> None:
        """Log the takeover of a domain by another trainer; the other domains continue."""
        logger.warning("another trainer took over a domain, as this trainer did not report in time: %s", error)

    def close(self) -> None:
        with suppress(RedisError):  # the report expires
            self._trainers.leave(self.name)
        for connection in (self._trainers, self._reports, self._loads):
            connection.close()

    def _measure(self) -> None:
        now = self._clock()
        decay = math.exp((self._looked_at - now) / _ROOM_SECONDS)
        self._room, self._looked_at = decay * self._room + (1 - decay) * self._capacity.spare(), now

    def _next_plan(self, now: TrainersState) -> DomainPlan:
        """Return the next plan.

        Without a plan, or without its trainers, an empty plan starts the wait for trainers. Later plans keep the
        domains of live trainers, and change the balance rarely.
        """
        rooms = {name: report.room for name, report in now.reports.items()}
        if now.plan is None or (now.plan.trainers and not any(name in rooms for name in now.plan.trainers.values())):
            return DomainPlan({}, now.time)
        plan, is_first = now.plan, not now.plan.trainers
        if is_first and now.time - plan.balanced < _GATHER_SECONDS:
            return plan
        reported = {domain: name for name, report in now.reports.items() for domain in report.domains}
        planned = {domain: name for domain, name in plan.trainers.items() if name in rooms}
        training = self._reports.get(list(self._domains))
        nets = {domain: report.account and report.account.worth for domain, report in training.items()}
        weight = weights({domain: nets.get(domain) for domain in self._domains})
        assigned = assign({**reported, **planned}, weight, rooms)
        last = 0.0 if is_first else plan.balanced  # after a first plan, a late trainer gets domains at once
        balanced = balance(assigned, weight, rooms)
        if balanced == assigned:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now.time
        elif now.time - self._uneven_since >= _SETTLED_SECONDS and now.time - last >= _BALANCE_SECONDS:
            return DomainPlan(balanced, now.time)
        return DomainPlan(assigned, last)


def share_of(settings: Settings, redis_url: str) -> Share:
    """Return the share of a trainer with these settings."""
    domains = settings.trained_domains
    return Share(domains) if settings.trainer.processes == 1 else Membership(settings, redis_url, domains)
