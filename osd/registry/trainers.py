"""Which trainers there are, and the plan of which domains each is to have, which any of them may change."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from osd.redis_client import LiveReports, RedisClient, decoded

EXPIRY_MS = 3000
"""A trainer that has not reported for so long is gone."""

_TRAINERS_KEY, _PLAN_KEY = "osd:trainers", "osd:trainers:plan"

_SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class TrainerReport(msgspec.Struct, frozen=True):
    """What a trainer says: the ``domains`` whose leases it has, and its ``room``.

    That is the share of the time, 0 to 1, that serving has lately left to training on its machine.
    """

    domains: tuple[str, ...]
    room: float


class Plan(msgspec.Struct, frozen=True):
    """The trainer that is to have each domain, by its name; ``balanced`` at a time in seconds by Redis' clock."""

    trainers: dict[str, str]
    balanced: float


class TrainersNow(NamedTuple):
    """The ``reports`` of trainers by their names, the ``plan``, None where there is none, and Redis' time.

    ``written`` is the plan as it is in Redis.
    """

    reports: dict[str, TrainerReport]
    plan: Plan | None
    time: float
    written: bytes


class Trainers(RedisClient):
    """What trainers say of themselves, and the plan.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the keys.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._reports = LiveReports(self._client, _TRAINERS_KEY, TrainerReport, "trainers")
        self._swap = self._client.register_script(_SWAP)

    def report(self, name: str, report: TrainerReport) -> None:
        """Report a trainer, which stays for three seconds."""
        self._reports.tell(name, report, EXPIRY_MS)

    def now(self) -> TrainersNow:
        """The trainers that reported within the last three seconds, and the plan."""
        reports = self._reports.read(EXPIRY_MS, EXPIRY_MS)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.get(_PLAN_KEY)
            pipe.time()
            found: Any = pipe.execute()
        written, (seconds, microseconds) = found
        plan = None if written is None else decoded(written, Plan, "plan of the trainers")
        return TrainersNow(reports, plan, seconds + microseconds / 1e6, written or b"")

    def replace(self, seen: TrainersNow, plan: Plan) -> bool:
        """Put ``plan`` in the place of the one that was ``seen``; False where another trainer was faster."""
        return bool(self._swap([_PLAN_KEY], [seen.written, msgspec.json.encode(plan)]))

    def leave(self, name: str) -> None:
        """A trainer ends."""
        self._reports.withdraw(name)
