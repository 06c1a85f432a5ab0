"""The rollout pointer: which drafter version serves a domain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from redis.exceptions import RedisError, WatchError

from osd.config import check_domain
from osd.hashing import unit_hash
from osd.redis_client import RedisClient, decoded

logger = logging.getLogger(__name__)

_DOMAINS = "osd:domains"

_Number = Annotated[int, msgspec.Meta(ge=1)]


class Rollout(msgspec.Struct, frozen=True):
    """A domain's version in service, and the canary with its share of requests (0 to 1).

    ``changed`` is the time of the change, in seconds since the epoch. A ``pinned`` domain is moved by operators only.
    """

    stable: _Number
    canary: _Number | None
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    changed: float
    pinned: bool = False

    def version_for(self, request_id: str) -> int:
        """The version that serves a request: the same in every replica, whatever is held out for evaluation."""
        if self.canary is not None and unit_hash(request_id.encode(), b"canary") < self.share:
            return self.canary
        return self.stable


class Pointer(RedisClient):
    """Reads and moves the rollout pointers in Redis, one round trip each.

    Raises:
        redis.exceptions.RedisError: from every method but ``watch``: Redis does not answer, or holds no rollout
            under that name.
        ValueError: the domain is not a valid name.
    """

    def get(self, domain: str) -> Rollout | None:
        """The domain's rollout, None when it has none yet."""
        data = self._client.get(_key(domain))
        return None if data is None else _decode(domain, data)

    def set(self, domain: str, rollout: Rollout) -> None:
        """Move the domain's pointer.

        Raises:
            ValueError: a version below 1 or a share outside 0 to 1.
        """
        key, data = _key(domain), _encode(domain, rollout)
        with self._client.pipeline() as pipe:
            pipe.sadd(_DOMAINS, domain)
            pipe.set(key, data)
            pipe.execute()

    def all(self) -> dict[str, Rollout]:
        """The rollout of every domain that has one, in two round trips."""
        names: Any = self._client.smembers(_DOMAINS)
        domains = sorted(name.decode() for name in names)
        found = self._client.mget([_key(domain) for domain in domains]) if domains else []
        return {name: _decode(name, data) for name, data in zip(domains, found, strict=True) if data is not None}

    def replace(self, domain: str, before: Rollout | None, rollout: Rollout) -> bool:
        """Move the domain's pointer if it still is ``before``, in two round trips; False when somebody else has.

        Raises:
            ValueError: a version below 1 or a share outside 0 to 1.
        """
        key, data = _key(domain), _encode(domain, rollout)
        with self._client.pipeline() as pipe:
            try:
                pipe.watch(key)
                found: Any = pipe.get(key)
                if (None if found is None else _decode(domain, found)) != before:
                    return False
                pipe.multi()
                pipe.sadd(_DOMAINS, domain)
                pipe.set(key, data)
                pipe.execute()
            except WatchError:
                return False
        return True

    def watch(self, domain: str, stop: threading.Event, interval: float = 0.5) -> Iterator[Rollout]:
        """Yield the rollout and then each change of it, until ``stop`` is set.

        Looks every ``interval`` seconds. While Redis is gone there is no change: whoever follows keeps what it has.
        """
        seen: Rollout | None = None
        failing = False
        while not stop.is_set():
            try:
                rollout = self.get(domain)
            except RedisError as error:
                if not failing:
                    logger.warning("rollout pointer of %s cannot be read (%s), keeping what is there", domain, error)
                failing = True
            else:
                failing = False
                if rollout is not None and rollout != seen:
                    seen = rollout
                    yield rollout
            stop.wait(interval)


def _key(domain: str) -> str:
    return f"osd:rollout:{check_domain(domain)}"


def _encode(domain: str, rollout: Rollout) -> bytes:
    data = msgspec.json.encode(rollout)
    try:
        msgspec.json.decode(data, type=Rollout)  # a Struct checks its limits only when it is read
    except msgspec.MsgspecError as error:
        raise ValueError(f"rollout of {domain}: {error}") from None
    return data


def _decode(domain: str, data: bytes | str) -> Rollout:
    return decoded(data, Rollout, f"rollout pointer of {domain}")
