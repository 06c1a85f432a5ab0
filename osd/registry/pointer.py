"""Rollout pointer: which drafter version serves a domain.

The pointer file is authoritative. Redis announces moves; any reader that finds Redis outdated updates it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.exceptions import DataError, RedisError, WatchError

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout, encode
from osd.registry.storage import ReadCache, Storage

__all__ = ["FencedError", "Pointer", "Rollout"]

logger = logging.getLogger(__name__)

_DOMAINS, _CHANNEL = "osd:domains", "osd:rollouts"
_POLL_SECONDS = 5.0  # maximum time between two polls while Redis announces no move
_SLICE_SECONDS = 0.5  # maximum delay until ``stop`` is noticed


class Pointer(RedisClient):
    """Reads and moves the rollout pointers of the registry in ``place``.

    The current rollout is the newer one of file and Redis, because a shared disk may show the last move late. ``watch``
    and ``all`` may use a file content that is up to ``Storage.patience`` seconds old.

    Raises:
        redis.exceptions.RedisError: from ``get`` and ``replace``: there is no readable pointer file, and Redis does not
            answer or holds other data under the key. From ``repair``: Redis does not answer.
        OSError: from ``get``: the pointer file cannot be read, and Redis has no rollout. From ``all``: the list of
            pointer files cannot be read. From ``replace`` and ``repair``: the disk cannot be read or written.
        ValueError: the domain is not a valid name.
    """

    def __init__(self, url: str, place: Path | Storage) -> None:
        super().__init__(url)
        self._files = PointerFiles(place)
        self._cache = ReadCache(self._files.storage.patience)

    def get(self, domain: str) -> Rollout | None:
        """Return the rollout of a domain, or None when it has none yet.

        If Redis is older than the pointer file, or holds other data, it is updated; a failure of this is logged.
        """
        return self._get(domain, self._files.read)

    def all(self) -> dict[str, Rollout]:
        """Return the rollouts of all domains that have one, by domain.

        If Redis does not answer, or holds other data for a domain without a pointer file, these are the rollouts of the
        pointer files.

        Raises:
            redis.exceptions.RedisError: Redis does not answer or holds other data, and no pointer file can be read.
        """
        durable = {
            domain: _read_durable(domain, self._read_cached)[0] for domain in self._cache.get("", self._files.domains)
        }
        try:
            names: Any = self._client.smembers(_DOMAINS)
            domains = sorted({name.decode() for name in names} | durable.keys())
            values: Any = self._client.mget([_key(domain) for domain in domains]) if domains else []
            newer = {
                name: self._newer(name, durable.get(name), data) for name, data in zip(domains, values, strict=True)
            }
        except RedisError:
            self._cache.doubt()
            if not any(durable.values()):
                raise
            newer = durable
        return {domain: rollout for domain, rollout in newer.items() if rollout is not None}

    def replace(self, domain: str, before: Rollout | None, rollout: Rollout, fence: int | None = None) -> bool:
        """Move the pointer of a domain if it still equals ``before``; return whether it was moved.

        Args:
            domain: the domain to move.
            before: the expected rollout, as ``get`` returned it.
            rollout: the new rollout.
            fence: the number of the trainer that moves the pointer, None for an operator.

        Raises:
            ValueError: a version is below 1 or does not exist, or a share is outside 0 to 1.
            FencedError: another trainer is newer.
        """

        def move(durable: Rollout | None) -> Rollout | None:
            current = self._newest(domain, durable)
            if _without_fence(current) != _without_fence(before):
                return None
            for number in sorted(rollout.versions):
                if not self._files.storage.has(domain, number):
                    raise ValueError(f"rollout of {domain}: there is no version {number}")
            moves, newest = (current.moves, current.fence) if current else (0, 0)
            return msgspec.structs.replace(rollout, moves=moves + 1, fence=newest)

        moved = self._files.update(domain, move, fence)
        if moved is None:
            return False
        self._announce(domain, moved)
        return True

    def repair(self, domain: str) -> Rollout | None:
        """Make file and Redis agree before any process follows the pointer; return the rollout.

        The file wins: a Redis with more moves belonged to another registry. Without a file the rollout of Redis is
        written to disk.
        """
        current: Rollout | None = None

        def repaired(durable: Rollout | None) -> Rollout | None:
            nonlocal current
            announced = self._read_redis(domain)
            current = durable or announced
            if current is None or announced is None or (durable is not None and announced.moves <= durable.moves):
                return None
            current = msgspec.structs.replace(current, moves=announced.moves + 1)
            return current

        self._files.update(domain, repaired)
        if current is not None:
            self._announce(domain, current)
        return current

    def watch(self, domain: str, stop: threading.Event, interval: float = 0.5) -> Iterator[Rollout]:
        """Yield the current rollout and then each move, until ``stop`` is set.

        The pointer is read when Redis announces a move, and every few seconds. While it cannot be read, nothing is
        yielded and the caller keeps its version.

        Args:
            domain: the domain to watch.
            stop: ends the iteration.
            interval: seconds between two reads while Redis does not answer.
        """
        last: Rollout | None = None
        failing = False
        with self.subscribe() as moves:
            while not stop.is_set():
                try:
                    rollout = self._get(domain, self._read_cached)
                except (RedisError, OSError) as error:
                    if not failing:
                        message = "rollout pointer of %s cannot be read (%s); the present version stays"
                        logger.warning(message, domain, error)
                    failing = True
                else:
                    failing = False
                    if rollout is not None and (last is None or rollout.moves > last.moves):
                        last = rollout
                        yield rollout
                moves.wait(stop, interval)

    def subscribe(self) -> MoveSubscription:
        """Return a subscription to moves, for one thread."""
        return MoveSubscription(self._client)

    def _get(self, domain: str, read: Callable[[str], Rollout | None]) -> Rollout | None:
        durable, error = _read_durable(domain, read)
        rollout = self._newest(domain, durable)
        if rollout is None and error is not None:
            raise error
        return rollout

    def _read_cached(self, domain: str) -> Rollout | None:
        """Return the rollout of the pointer file, up to ``Storage.patience`` seconds old."""
        return self._cache.get(domain, lambda: self._files.read(domain))

    def _read_redis(self, domain: str) -> Rollout | None:
        """Return the rollout in Redis, or None for a missing key or other data."""
        try:
            return _decode(domain, self._client.get(_key(domain)))
        except DataError as error:
            logger.warning("%s", error)
            return None

    def _newest(self, domain: str, durable: Rollout | None) -> Rollout | None:
        """Return the newer rollout of file and Redis; Redis may fail when there is a durable rollout."""
        try:
            return self._newer(domain, durable, self._client.get(_key(domain)))
        except RedisError:
            self._cache.doubt()
            if durable is None:
                raise
            return durable

    def _newer(self, domain: str, durable: Rollout | None, data: Any) -> Rollout | None:
        """Return the newer rollout of file and Redis, and update an outdated Redis.

        Args:
            domain: the domain of the rollout.
            durable: the rollout of the file, if any.
            data: the value of the key in Redis.

        Raises:
            DataError: ``data`` is not a rollout, and there is no durable one.
        """
        try:
            announced = _decode(domain, data)
        except DataError:
            if durable is None:
                raise
            announced = None
        if durable is None or (announced is not None and announced.moves > durable.moves):
            return announced
        if announced is None or announced.moves < durable.moves:
            self._announce(domain, durable)
        return durable

    def _announce(self, domain: str, rollout: Rollout) -> None:
        """Write a move to Redis and publish it; after a failure the next reader does it."""
        key, data = _key(domain), encode(domain, rollout)
        try:
            with self._client.pipeline() as pipe:
                pipe.watch(key)
                try:
                    announced = _decode(domain, pipe.get(key))
                except DataError:
                    announced = None
                if announced is not None and announced.moves > rollout.moves:
                    return
                pipe.multi()
                pipe.sadd(_DOMAINS, domain)
                pipe.set(key, data)
                pipe.publish(_CHANNEL, b"")
                pipe.execute()
        except WatchError:
            return  # another process announces this move or a later one
        except RedisError as error:
            logger.warning("move %d of %s cannot be written to Redis yet: %s", rollout.moves, domain, error)


def _read_durable(domain: str, read: Callable[[str], Rollout | None]) -> tuple[Rollout | None, OSError | None]:
    """Return the rollout of the pointer file, or the error of reading it."""
    try:
        return read(domain), None
    except OSError as error:
        return None, error


def _without_fence(rollout: Rollout | None) -> Rollout | None:
    """Return a rollout without the trainer's number: a takeover by another trainer is not a move."""
    return None if rollout is None else msgspec.structs.replace(rollout, fence=0)


def _key(domain: str) -> str:
    return f"osd:rollout:{check_domain(domain)}"


def _decode(domain: str, data: Any) -> Rollout | None:
    return None if data is None else decoded(data, Rollout, f"rollout pointer of {domain}")


class MoveSubscription:
    """Subscription of one thread to the moves of all pointers; as a context manager it unsubscribes on exit."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._channel: Any = None

    def __enter__(self) -> MoveSubscription:
        return self

    def __exit__(self, *error: object) -> None:
        self._unsubscribe()

    def wait(self, stop: threading.Event, interval: float) -> None:
        """Return when the caller should read the pointers.

        That is after a move, after at most five seconds, or when ``stop`` is set; while Redis does not answer it is
        after ``interval`` seconds. A call that subscribes returns at once, because moves before it went unnoticed.
        """
        end = time.monotonic() + _POLL_SECONDS * random.uniform(0.5, 1)  # noqa: S311  no secret
        try:
            if self._channel is None:
                channel = self._client.pubsub(ignore_subscribe_messages=True)
                channel.subscribe(_CHANNEL)
                self._channel = channel
                return
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                if self._channel.get_message(timeout=min(left, _SLICE_SECONDS)) is not None:
                    return
        except (RedisError, OSError):
            self._unsubscribe()
            stop.wait(interval)

    def _unsubscribe(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(RedisError, OSError):
                self._channel.close()
        self._channel = None
