"""Purge of requests: the list of requests to forget, and the answers of the trainers and replicas that forgot them.

Everything is stored in Redis, so that a trainer or a replica that starts later sees the list too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from redis.exceptions import DataError, RedisError

from osd.redis_client import RedisClient, decoded

logger = logging.getLogger(__name__)

REMEMBERED_SECONDS = 86_400.0
"""Time for which records of a purged request are refused; no record stays in transit for longer."""

LISTED_SECONDS = 30 * 86_400.0
"""Time for which a purge is listed, for snapshots on nodes where no replica runs for a while."""

HEARTBEAT_SECONDS = 3.0
"""Longest time between two heartbeats of a member."""

ALIVE_SECONDS = 5.0
"""Age of its last heartbeat from which a member counts as absent."""

_KNOWN_MS = 86_400_000  # time for which an absent member is known

_PURGES, _ANSWERS, _ALIVE = "osd:purges", "osd:purged:", "osd:{}:"

SHARED_TOKENS = "osd:vllm:"
"""Prefix of the streams in which recall inside vLLM shares tokens without their requests."""

Role = Literal["trainer", "replica"]
_ROLES: tuple[Role, ...] = get_args(Role)


class Member(NamedTuple):
    """Process that stores data of requests: the trainer of the domain ``name``, or the replica ``name``."""

    role: Role
    name: str


class RemovedData(msgspec.Struct, frozen=True):
    """Answer of a member to a purge.

    Attributes:
        records: the number of records removed from a trainer's memory, or of requests whose trace was being built.
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
            pipe.zremrangebyscore(_PURGES, "-inf", now - LISTED_SECONDS)
            pipe.delete(_ANSWERS + request)
            pipe.zadd(_PURGES, {request: now})
            pipe.execute()

    def requests(self, seconds: float = REMEMBERED_SECONDS) -> dict[str, float]:
        """Return the requests that were purged in the last ``seconds``, with the time of each purge."""
        oldest = time.time() - seconds
        entries: Any = self._client.zrangebyscore(_PURGES, oldest, "+inf", withscores=True)
        return {request.decode(): purged_at for request, purged_at in entries}

    def delete_shared_tokens(self) -> None:
        """Delete the tokens that recall inside vLLM shares, as their requests are not known."""
        for key in self._client.scan_iter(SHARED_TOKENS + "*"):
            self._client.unlink(key)

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
        """Send the heartbeat of a member."""
        self._client.set(_key(member), b"1", px=_KNOWN_MS)

    def leave(self, member: Member) -> None:
        """Remove a member that ends; purges do not wait for it."""
        self._client.delete(_key(member))

    def silence(self, member: Member) -> float | None:
        """Return the seconds since the last heartbeat of a member.

        None stands for a member that left, never reported, or did not report since Redis's clock was set back.
        """
        left: Any = self._client.pttl(_key(member))
        return None if left <= 0 or math.isinf(age := _age(left)) else age

    def members(self) -> dict[Member, float]:
        """Return the members of the last day that did not leave, with the seconds since the last heartbeat of each.

        The seconds are infinite for a member that did not report since Redis's clock was set back.
        """
        members: list[Member] = []
        for role in _ROLES:
            prefix = _ALIVE.format(role)
            members += [Member(role, key.decode().removeprefix(prefix)) for key in self._client.scan_iter(prefix + "*")]
        with self._client.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.pttl(_key(member))
            left: list[int] = pipe.execute()
        return {
            member: _age(milliseconds) for member, milliseconds in zip(members, left, strict=True) if milliseconds > 0
        }


def _key(member: Member) -> str:
    return _ALIVE.format(member.role) + member.name


def _age(left_ms: int) -> float:
    """Return the seconds since a heartbeat from the time to live of its key; infinity if they are unknown.

    A key lives longer than ``_KNOWN_MS`` only if Redis's clock was set back after the heartbeat. Corrections of less
    than ``ALIVE_SECONDS`` do not count.
    """
    age = (_KNOWN_MS - left_ms) / 1000
    return max(age, 0.0) if age > -ALIVE_SECONDS else math.inf


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
        newest: the time of the newest purge that is listed, 0 without one.
        updated: the time of the last complete update, in seconds since the epoch; 0 before the first.
    """

    def __init__(self, purges: Purges, member: Member, forget: Callable[[str, float], RemovedData]) -> None:
        """Create a follower.

        Args:
            purges: the list of purged requests.
            member: the member that forgets.
            forget: gets each request with the time of its purge. After an OSError it is called again at the next
                update, and there is no answer until then.
        """
        self._purges, self._member, self._forget = purges, member, forget
        self.requests: dict[str, float] = {}
        self.newest = self.updated = 0.0
        self._forgotten: dict[str, float] = {}
        self._failing: set[str] = set()

    def alive(self) -> None:
        """Send a heartbeat; log an error of Redis."""
        try:
            self._purges.alive(self._member)
        except RedisError as error:
            logger.debug("Redis does not answer: %s", error)

    def has_new_requests(self) -> bool:
        """Return whether the list has new purges; return False while it cannot be read."""
        try:
            return bool(self._purges.requests().items() - self._forgotten.items())
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)
            return False

    def update(self) -> None:
        """Forget all newly purged requests and write the answers; log an error of Redis or of ``forget``.

        The first update reads the whole list, and later ones the last day.
        """
        now = time.time()
        try:
            self.requests = self._purges.requests(REMEMBERED_SECONDS if self.updated else LISTED_SECONDS)
            listed = [*self.requests.values(), self.newest]
            self.newest = max((at for at in listed if at > now - LISTED_SECONDS), default=0.0)
            self._forgotten = {name: at for name, at in self._forgotten.items() if self.requests.get(name) == at}
            for request, purged_at in self.requests.items():
                if request not in self._forgotten:
                    self._purges.alive(self._member)
                    self._try_to_forget(request, purged_at)
            self._failing &= self.requests.keys()
            if not self._failing:
                self.updated = now
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)

    def close(self) -> None:
        """Leave the members and close the connection."""
        try:
            self._purges.leave(self._member)
        except RedisError as error:
            logger.debug("Redis does not answer: %s", error)
        self._purges.close()

    def _try_to_forget(self, request: str, purged_at: float) -> None:
        try:
            removed = self._forget(request, purged_at)
        except OSError as error:
            if request not in self._failing:
                logger.warning("a purged request cannot be removed yet, trying again: %s", error)
            self._failing.add(request)
            return
        self._failing.discard(request)
        self._purges.answer(request, self._member, removed)
        self._forgotten[request] = purged_at
