"""Requests that are to be forgotten: what the command line asks for, and what trainers and replicas say they removed.

Everything is in Redis, so that a trainer or a replica that starts later learns of it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from redis.exceptions import DataError, RedisError

from osd.redis_client import RedisClient, decoded

logger = logging.getLogger(__name__)

REMEMBERED_SECONDS = 86_400.0
"""How long a purged request is refused: longer than any record is on its way."""

ALIVE_MS = 5000
"""For how long a member's sign of life holds."""

_PURGES, _ANSWERS, _ALIVE = "osd:purges", "osd:purged:", "osd:{}:"

Role = Literal["trainer", "replica"]
_ROLES: tuple[Role, ...] = get_args(Role)


class Member(NamedTuple):
    """Who remembers something of requests: the trainer of the domain ``name``, or the replica of that name."""

    role: Role
    name: str


class Removed(msgspec.Struct, frozen=True):
    """What a member removed: ``records`` from a trainer's memory, ``entries`` from what a replica recalls.

    ``learnt`` when the drafter in training has seen the records.
    """

    records: int = 0
    learnt: bool = False
    entries: int = 0


class Purges(RedisClient):
    """The list of purged requests and the members' answers; each method is one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the keys.
    """

    def ask(self, request: str) -> None:
        """Have a request forgotten by every member, and refused when it still comes."""
        now = time.time()
        with self._client.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(_PURGES, "-inf", now - REMEMBERED_SECONDS)
            pipe.delete(_ANSWERS + request)
            pipe.zadd(_PURGES, {request: now})
            pipe.execute()

    def asked(self) -> dict[str, float]:
        """The requests that were purged lately, with the time of asking."""
        found: Any = self._client.zrangebyscore(_PURGES, time.time() - REMEMBERED_SECONDS, "+inf", withscores=True)
        return {request.decode(): at for request, at in found}

    def answer(self, request: str, member: Member, removed: Removed) -> None:
        """Say what a member removed."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(_ANSWERS + request, ":".join(member), msgspec.json.encode(removed))
            pipe.pexpire(_ANSWERS + request, int(1000 * REMEMBERED_SECONDS))
            pipe.execute()

    def answers(self, request: str) -> dict[Member, Removed]:
        """What members said so far."""
        found: Any = self._client.hgetall(_ANSWERS + request)
        what = f"answers to the purge of {request}"
        return {_member(name.decode()): decoded(data, Removed, what) for name, data in found.items()}

    def alive(self, member: Member) -> None:
        """Say that a member will answer; it holds for five seconds."""
        self._client.set(_ALIVE.format(member.role) + member.name, b"1", px=ALIVE_MS)

    def members(self) -> set[Member]:
        """Those that will answer."""
        found: set[Member] = set()
        for role in _ROLES:
            prefix = _ALIVE.format(role)
            found |= {Member(role, key.decode().removeprefix(prefix)) for key in self._client.scan_iter(prefix + "*")}
        return found


def _member(written: str) -> Member:
    of, _, name = written.partition(":")
    for role in _ROLES:
        if of == role:
            return Member(role, name)
    raise DataError(f"{written} is no trainer and no replica")


class PurgeFollower:
    """Follows the list of purged requests for one member, which forgets each whenever it is asked for.

    ``asked`` are the requests that it knows of, with the time of asking; ``caught_up`` says that it knows of all that
    were asked before its first look.
    """

    def __init__(self, purges: Purges, member: Member, forget: Callable[[str, float], Removed]) -> None:
        """Call ``forget`` with each request and the time of asking."""
        self._purges, self._member, self._forget = purges, member, forget
        self.asked: dict[str, float] = {}
        self.caught_up = False

    def alive(self) -> None:
        """Say that the member will answer."""
        try:
            self._purges.alive(self._member)
        except RedisError as error:
            logger.debug("Redis does not answer: %s", error)

    def wanted(self) -> bool:
        """Whether something is asked for since the last look; not while that cannot be read."""
        try:
            return bool(self._purges.asked().items() - self.asked.items())
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)
            return False

    def look(self) -> None:
        """Forget what is asked for since the last look, and answer."""
        try:
            asked = self._purges.asked()
            for request, at in asked.items():
                if self.asked.get(request) != at:
                    self._purges.answer(request, self._member, self._forget(request, at))
                    self.asked[request] = at
            self.asked, self.caught_up = asked, True
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)

    def close(self) -> None:
        """Close the connection."""
        self._purges.close()
