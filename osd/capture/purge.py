"""Purge of requests: the list of requests to forget, and the answers of the trainers and replicas that forgot them.

Everything is stored in Redis, so that a trainer or a replica that starts later sees the list too.
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
"""Time for which records of a purged request are refused; no record stays in transit for longer."""

ALIVE_MS = 5000
"""Validity of a member's heartbeat, in milliseconds."""

_PURGES, _ANSWERS, _ALIVE = "osd:purges", "osd:purged:", "osd:{}:"

Role = Literal["trainer", "replica"]
_ROLES: tuple[Role, ...] = get_args(Role)


class Member(NamedTuple):
    """Process that stores data of requests: the trainer of the domain ``name``, or the replica ``name``."""

    role: Role
    name: str


class RemovedData(msgspec.Struct, frozen=True):
    """Answer of a member to a purge.

    Attributes:
        records: the number of records removed from a trainer's memory.
        learnt: whether the drafter in training was trained on the request.
        entries: the number of entries removed from a replica's n-gram cache.
    """

    records: int = 0
    learnt: bool = False
    entries: int = 0


class Purges(RedisClient):
    """List of purged requests and answers of the members; each method makes one round trip, ``members`` several.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or a key holds data of another kind.
    """

    def add(self, request: str) -> None:
        """Ask all members to forget a request and to refuse its later records."""
        now = time.time()
        with self._client.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(_PURGES, "-inf", now - REMEMBERED_SECONDS)
            pipe.delete(_ANSWERS + request)
            pipe.zadd(_PURGES, {request: now})
            pipe.execute()

    def requests(self) -> dict[str, float]:
        """Return the requests that were purged within the last day, with the time of each purge."""
        oldest = time.time() - REMEMBERED_SECONDS
        entries: Any = self._client.zrangebyscore(_PURGES, oldest, "+inf", withscores=True)
        return {request.decode(): purged_at for request, purged_at in entries}

    def answer(self, request: str, member: Member, removed: RemovedData) -> None:
        """Write the data that a member removed for a purge; the answer expires with the purge."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(_ANSWERS + request, ":".join(member), msgspec.json.encode(removed))
            pipe.pexpire(_ANSWERS + request, int(1000 * REMEMBERED_SECONDS))
            pipe.execute()

    def answers(self, request: str) -> dict[Member, RemovedData]:
        """Return the answers to the purge of a request so far."""
        fields: Any = self._client.hgetall(_ANSWERS + request)
        content = f"answers to the purge of {request}"
        return {_parse_member(name.decode()): decoded(data, RemovedData, content) for name, data in fields.items()}

    def alive(self, member: Member) -> None:
        """Send the heartbeat of a member, which is valid for five seconds."""
        self._client.set(_ALIVE.format(member.role) + member.name, b"1", px=ALIVE_MS)

    def members(self) -> set[Member]:
        """Return the members with a valid heartbeat."""
        members: set[Member] = set()
        for role in _ROLES:
            prefix = _ALIVE.format(role)
            members |= {Member(role, key.decode().removeprefix(prefix)) for key in self._client.scan_iter(prefix + "*")}
        return members


def _parse_member(text: str) -> Member:
    prefix, _, name = text.partition(":")
    for role in _ROLES:
        if prefix == role:
            return Member(role, name)
    raise DataError(f"{text} is no trainer and no replica")


class PurgeFollower:
    """Follower of the list of purged requests for one member, which forgets each request on the list.

    Attributes:
        requests: the purged requests that the member has seen, with the time of each purge.
        caught_up: whether the member has read the whole list at least once.
    """

    def __init__(self, purges: Purges, member: Member, forget: Callable[[str, float], RemovedData]) -> None:
        """Create a follower; ``forget`` gets each request with the time of its purge."""
        self._purges, self._member, self._forget = purges, member, forget
        self.requests: dict[str, float] = {}
        self.caught_up = False

    def alive(self) -> None:
        """Send a heartbeat; log an error of Redis."""
        try:
            self._purges.alive(self._member)
        except RedisError as error:
            logger.debug("Redis does not answer: %s", error)

    def has_new_requests(self) -> bool:
        """Return whether the list has new purges; return False while it cannot be read."""
        try:
            return bool(self._purges.requests().items() - self.requests.items())
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)
            return False

    def update(self) -> None:
        """Forget all newly purged requests and write the answers; log an error of Redis."""
        try:
            purged = self._purges.requests()
            for request, purged_at in purged.items():
                if self.requests.get(request) != purged_at:
                    self._purges.answer(request, self._member, self._forget(request, purged_at))
                    self.requests[request] = purged_at
            self.requests, self.caught_up = purged, True
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)

    def close(self) -> None:
        """Close the connection."""
        self._purges.close()
