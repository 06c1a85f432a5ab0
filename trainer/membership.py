"""Which of the service's domains this trainer is to have: all of them, or those that the plan of all trainers says."""

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
from osd.registry.trainers import EXPIRY_MS, Plan, TrainerReport, Trainers, TrainersNow
from osd.registry.training import TrainingReports
from trainer.assignment import assign, balance, weights
from trainer.capacity import Capacity

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 3.0
"""After which 1 / e is left of what the room was before."""

_GATHER_SECONDS = EXPIRY_MS / 1000
"""For which a plan waits that begins with nobody's: trainers start, or tell a Redis that lost everything, by then."""

_SETTLED_SECONDS = 10.0
"""For which domains could be clearly better divided, before they are."""

_BALANCE_SECONDS = 60.0
"""Between two such moves."""


class Share:
    """A trainer's part in the domains of its service: all of them, where it is the only trainer."""

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = domains

    def domains(self, held: Collection[str]) -> Collection[str]:
        """Return those that it is to have now, once a second; it has the leases of ``held``."""
        return self._domains

    def elsewhere(self, domain: str) -> bool | None:
        """Whether another trainer that lives has a domain, None where that is not known."""
        return None

    def lost(self, error: FencedError) -> None:
        """Take note that another trainer has taken over a domain that this one had.

        Raises:
            FencedError: that ends the trainer.
        """
        raise error

    def close(self) -> None:
        """Give all domains up: the trainer ends."""


class Membership(Share):
    """The share of one of several trainers, who follow a plan in Redis; whoever sees that it must change changes it.

    A domain of a trainer that is gone goes to the one with most room at once. Domains move from a trainer to another
    where that has had clearly more room for them for ten seconds, and once a minute at most. What a trainer believes
    is safe in any case: it computes for a domain with the domain's lease alone. While Redis is gone everybody keeps
    what he has.
    """

    def __init__(
        self, settings: Settings, redis_url: str, domains: Collection[str],
        machine: str | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Join the trainers of ``domains``; ``machine`` names the one that this trainer shares, None for this one."""
        self.name = secrets.token_hex(8)
        super().__init__(domains)
        self._clock = clock
        self._trainers, self._reports = Trainers(redis_url), TrainingReports(redis_url)
        self._loads = ReplicaLoads(redis_url, machine)
        self._capacity = Capacity(self._loads, settings.trainer, time.process_time)
        self._room, self._looked_at = 1.0, clock()
        self._now: TrainersNow | None = None
        self._uneven_since: float | None = None
        self._mine: list[str] = []

    def domains(self, held: Collection[str]) -> Collection[str]:
        self._measure()
        try:
            self._trainers.report(self.name, TrainerReport(tuple(sorted(held)), self._room))
            self._now = now = self._trainers.now()
            plan = self._planned(now)
            if plan != now.plan and not self._trainers.replace(now, plan):
                return self._mine  # another trainer was faster, and its plan is read the next time
        except RedisError as error:
            logger.debug("the plan of the trainers cannot be read, everybody keeps what he has: %s", error)
            self._now = None
            return self._mine
        mine = [domain for domain in self._domains if plan.trainers.get(domain) == self.name]
        if mine != self._mine:
            logger.info("this trainer is to have %s", ", ".join(mine) or "no domain")
        self._mine = mine
        return mine

    def elsewhere(self, domain: str) -> bool | None:
        now = self._now
        if now is None:
            return None
        return any(domain in report.domains for name, report in now.reports.items() if name != self.name)

    def lost(self, error: FencedError) -> None:
        """See ``Share.lost``: this trainer goes on with its other domains."""
        logger.warning("this trainer was thought to be gone, and lets a domain go: %s", error)

    def close(self) -> None:
        with suppress(RedisError):  # it is gone after a while
            self._trainers.leave(self.name)
        for connection in (self._trainers, self._reports, self._loads):
            connection.close()

    def _measure(self) -> None:
        now = self._clock()
        kept = math.exp((self._looked_at - now) / _ROOM_SECONDS)
        self._room, self._looked_at = kept * self._room + (1 - kept) * self._capacity.spare(), now

    def _planned(self, now: TrainersNow) -> Plan:
        """What the plan is to be."""
        rooms = {name: report.room for name, report in now.reports.items()}
        if now.plan is None or (now.plan.trainers and not any(name in rooms for name in now.plan.trainers.values())):
            return Plan({}, now.time)
        plan, begun = now.plan, bool(now.plan.trainers)
        if not begun and now.time - plan.balanced < _GATHER_SECONDS:
            return plan
        told = {domain: name for name, report in now.reports.items() for domain in report.domains}
        lively = {domain: name for domain, name in plan.trainers.items() if name in rooms}
        said = self._reports.get(list(self._domains))
        nets = {domain: one.account and one.account.worth for domain, one in said.items()}
        weight = weights({domain: nets.get(domain) for domain in self._domains})
        given = assign({**told, **lively}, weight, rooms)
        last = plan.balanced if begun else 0.0  # who comes a little later need not wait for his part
        balanced = balance(given, weight, rooms)
        if balanced == given:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now.time
        elif now.time - self._uneven_since >= _SETTLED_SECONDS and now.time - last >= _BALANCE_SECONDS:
            return Plan(balanced, now.time)
        return Plan(given, last)


def share_of(settings: Settings, redis_url: str) -> Share:
    """The part of a trainer of ``settings``."""
    domains = settings.trained_domains
    return Share(domains) if settings.trainer.processes == 1 else Membership(settings, redis_url, domains)
