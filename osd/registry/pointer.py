"""The rollout pointer: which drafter version serves a domain.

What is on disk counts. Redis spreads the news, and is repaired by whoever finds that it is behind.
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
_LOOK_SECONDS = 5.0  # between two looks at most, where Redis tells of no move
_SLICE_SECONDS = 0.5  # within which ``stop`` is seen


class Pointer(RedisClient):
    """Reads and moves the rollout pointers of the registry in ``place``.

    A rollout is the newer one of what is on disk and of what Redis has: a shared disk may show the last move late. Who
    watches, by ``watch`` or ``all``, sees what is on disk as it was ``Storage.patience`` seconds before at worst.

    Raises:
        redis.exceptions.RedisError: from every method but ``watch``: nothing is on disk, and Redis does not answer or
            holds no rollout under that name.
        OSError: from the same: the disk does not give or take it.
        ValueError: the domain is not a valid name.
    """

    def __init__(self, url: str, place: Path | Storage) -> None:
        super().__init__(url)
        self._files = PointerFiles(place)
        self._watched = ReadCache(self._files.storage.patience)

    def get(self, domain: str) -> Rollout | None:
        """The domain's rollout, None when it has none yet."""
        return self._get(domain, self._files.read)

    def all(self) -> dict[str, Rollout]:
        """The rollout of every domain that has one."""
        known = self._watched.get("", self._files.domains)
        durable = {domain: _durable(domain, self._look)[0] for domain in known}
        try:
            names: Any = self._client.smembers(_DOMAINS)
            domains = sorted({name.decode() for name in names} | durable.keys())
            found: Any = self._client.mget([_key(domain) for domain in domains]) if domains else []
            newer = {
                name: self._newer(name, durable.get(name), data) for name, data in zip(domains, found, strict=True)
            }
        except RedisError:
            self._watched.doubt()
            if not any(durable.values()):
                raise
            newer = durable
        return {domain: rollout for domain, rollout in newer.items() if rollout is not None}

    def replace(self, domain: str, before: Rollout | None, rollout: Rollout, fence: int | None = None) -> bool:
        """Move the domain's pointer if it still is ``before``, as ``get`` gave it; False when somebody else has.

        ``fence`` is the number of the trainer that moves it, None for anybody else.

        Raises:
            ValueError: a version below 1, one that is not there, or a share outside 0 to 1.
            FencedError: the trainer is not the newest.
        """

        def move(durable: Rollout | None) -> Rollout | None:
            now = self._newest(domain, durable)
            if _unfenced(now) != _unfenced(before):
                return None
            for number in sorted(rollout.versions):
                if not self._files.storage.has(domain, number):
                    raise ValueError(f"rollout of {domain}: there is no version {number}")
            moves, newest = (now.moves, now.fence) if now else (0, 0)
            return msgspec.structs.replace(rollout, moves=moves + 1, fence=newest)

        moved = self._files.update(domain, move, fence)
        if moved is None:
            return False
        self._spread(domain, moved)
        return True

    def repair(self, domain: str) -> Rollout | None:
        """Make Redis say what is on disk, before anything follows it; returns that.

        A Redis that is ahead was another registry's. Only where nothing is on disk its rollout is taken down.
        """
        found: Rollout | None = None

        def mend(durable: Rollout | None) -> Rollout | None:
            nonlocal found
            told = self._told(domain)
            found = durable or told
            if found is None or told is None or (durable is not None and told.moves <= durable.moves):
                return None
            found = msgspec.structs.replace(found, moves=told.moves + 1)
            return found

        self._files.update(domain, mend)
        if found is not None:
            self._spread(domain, found)
        return found

    def watch(self, domain: str, stop: threading.Event, interval: float = 0.5) -> Iterator[Rollout]:
        """Yield the rollout and then each move of it, until ``stop`` is set.

        Looks when Redis tells of a move and every few seconds, or every ``interval`` while Redis does not answer. While
        it cannot be read there is no change: whoever follows keeps what it has.
        """
        seen: Rollout | None = None
        failing = False
        with self.news() as news:
            while not stop.is_set():
                try:
                    rollout = self._get(domain, self._look)
                except (RedisError, OSError) as error:
                    if not failing:
                        what = "rollout pointer of %s cannot be read (%s), keeping what is there"
                        logger.warning(what, domain, error)
                    failing = True
                else:
                    failing = False
                    if rollout is not None and (seen is None or rollout.moves > seen.moves):
                        seen = rollout
                        yield rollout
                news.wait(stop, interval)

    def news(self) -> MoveNews:
        """What tells one thread when to look."""
        return MoveNews(self._client)

    def _get(self, domain: str, read: Callable[[str], Rollout | None]) -> Rollout | None:
        durable, unread = _durable(domain, read)
        rollout = self._newest(domain, durable)
        if rollout is None and unread is not None:
            raise unread
        return rollout

    def _look(self, domain: str) -> Rollout | None:
        """What is on disk, for those who watch."""
        return self._watched.get(domain, lambda: self._files.read(domain))

    def _told(self, domain: str) -> Rollout | None:
        """What Redis has; None for anything else under the key."""
        try:
            return _decode(domain, self._client.get(_key(domain)))
        except DataError as error:
            logger.warning("%s", error)
            return None

    def _newest(self, domain: str, durable: Rollout | None) -> Rollout | None:
        """What is on disk or what Redis has, which does not have to answer where something is on disk."""
        try:
            return self._newer(domain, durable, self._client.get(_key(domain)))
        except RedisError:
            self._watched.doubt()
            if durable is None:
                raise
            return durable

    def _newer(self, domain: str, durable: Rollout | None, data: Any) -> Rollout | None:
        """What is on disk or what Redis has; a Redis that is behind is told.

        Raises:
            DataError: Redis has something else, and nothing is on disk.
        """
        try:
            told = _decode(domain, data)
        except DataError:
            if durable is None:
                raise
            told = None
        if durable is None or (told is not None and told.moves > durable.moves):
            return told
        if told is None or told.moves < durable.moves:
            self._spread(domain, durable)
        return durable

    def _spread(self, domain: str, rollout: Rollout) -> None:
        """Tell Redis of a move; whoever reads it next does when this fails."""
        key, data = _key(domain), encode(domain, rollout)
        try:
            with self._client.pipeline() as pipe:
                pipe.watch(key)
                try:
                    told = _decode(domain, pipe.get(key))
                except DataError:
                    told = None
                if told is not None and told.moves > rollout.moves:
                    return
                pipe.multi()
                pipe.sadd(_DOMAINS, domain)
                pipe.set(key, data)
                pipe.publish(_CHANNEL, b"")
                pipe.execute()
        except WatchError:
            return  # somebody else tells of this move or of a later one
        except RedisError as error:
            logger.warning("Redis is not told yet of move %d of %s: %s", rollout.moves, domain, error)


def _durable(domain: str, read: Callable[[str], Rollout | None]) -> tuple[Rollout | None, OSError | None]:
    """What is on disk, or why it cannot be read."""
    try:
        return read(domain), None
    except OSError as error:
        return None, error


def _unfenced(rollout: Rollout | None) -> Rollout | None:
    """What the pointer says without the trainer's number: a trainer that takes over moves nothing."""
    return None if rollout is None else msgspec.structs.replace(rollout, fence=0)


def _key(domain: str) -> str:
    return f"osd:rollout:{check_domain(domain)}"


def _decode(domain: str, data: Any) -> Rollout | None:
    return None if data is None else decoded(data, Rollout, f"rollout pointer of {domain}")


class MoveNews:
    """Subscription of one thread to moves of any pointer; leaving it as a context ends it."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._channel: Any = None

    def __enter__(self) -> MoveNews:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def wait(self, stop: threading.Event, interval: float) -> None:
        """Return when it is time to look: a pointer has moved, five seconds are over at most, or ``stop`` is set.

        While Redis does not tell, that is after ``interval`` seconds. It is time at once when Redis has just been asked
        to tell, as nobody was told of what moved before.
        """
        end = time.monotonic() + _LOOK_SECONDS * random.uniform(0.5, 1)  # noqa: S311  no secret
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
            self._leave()
            stop.wait(interval)

    def _leave(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(RedisError, OSError):
                self._channel.close()
        self._channel = None
