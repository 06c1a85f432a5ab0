"""Registry of living trainers in Redis, with the plan that assigns domains to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from osd.redis_client import LiveReports, RedisClient, decoded

EXPIRY_MS = 3000
"""Milliseconds without a report after which a trainer counts as dead."""

_TRAINERS_KEY, _PLAN_KEY = "osd:trainers", "osd:trainers:plan"

_SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class TrainerReport(msgspec.Struct, frozen=True):
    """Report of a trainer.

    Attributes:
        domains: the domains whose leases the trainer has.
        room: the share of recent time, 0 to 1, that serving has left to training on the trainer's machine.
    """

    domains: tuple[str, ...]
    room: float


class DomainPlan(msgspec.Struct, frozen=True):
    """Assignment of domains to trainers; any trainer may change it.

    Attributes:
        trainers: the name of the trainer for each domain.
        balanced: the time of the last balancing, in seconds by the clock of Redis.
    """

    trainers: dict[str, str]
    balanced: float


class TrainersState(NamedTuple):
    """State of all trainers.

    Attributes:
        reports: the reports by the name of the trainer.
        plan: the plan, None when there is none.
        time: the time in seconds by the clock of Redis.
        plan_data: the plan as Redis stores it, for ``Trainers.replace``.
    """

    reports: dict[str, TrainerReport]
    plan: DomainPlan | None
    time: float
    plan_data: bytes


class Trainers(RedisClient):
    """Reports of trainers, and their plan.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or a key holds data of another kind.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._reports = LiveReports(self._client, _TRAINERS_KEY, TrainerReport, "trainers")
        self._swap = self._client.register_script(_SWAP)

    def report(self, name: str, report: TrainerReport) -> None:
        """Write the report of a trainer; it expires after three seconds."""
        self._reports.write(name, report, EXPIRY_MS)

    def state(self) -> TrainersState:
        """Return the reports of the last three seconds, and the plan."""
        reports = self._reports.read(EXPIRY_MS, EXPIRY_MS)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.get(_PLAN_KEY)
            pipe.time()
            replies: Any = pipe.execute()
        data, (seconds, microseconds) = replies
        plan = None if data is None else decoded(data, DomainPlan, "plan of the trainers")
        return TrainersState(reports, plan, seconds + microseconds / 1e6, data or b"")

    def replace(self, before: TrainersState, plan: DomainPlan) -> bool:
        """Replace the plan in ``before`` by a new one; return False when another trainer has already changed it."""
        return bool(self._swap([_PLAN_KEY], [before.plan_data, msgspec.json.encode(plan)]))

    def leave(self, name: str) -> None:
        """Delete the report of a trainer that ends."""
        self._reports.withdraw(name)
