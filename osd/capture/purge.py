"""Requests that are to be forgotten: what the command line asks for, and what each trainer says it removed.

Everything is in Redis, so that a trainer that starts later learns of it too.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from osd.redis_client import RedisClient, decoded

REMEMBERED_SECONDS = 86_400.0
"""How long a purged request is refused: longer than any record is on its way."""

_PURGES, _ANSWERS, _TRAINER = "osd:purges", "osd:purged:", "osd:trainer:"
_ALIVE_MS = 5000


class Removed(msgspec.Struct, frozen=True):
    """What a trainer removed: ``records`` from its memory; ``learnt`` when the drafter in training has seen them."""

    records: int
    learnt: bool


class Purges(RedisClient):
    """The list of purged requests and the trainers' answers; each method is one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the keys.
    """

    def ask(self, request: str) -> None:
        """Have a request forgotten by every trainer, and refused when it still comes."""
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

    def answer(self, request: str, domain: str, removed: Removed) -> None:
        """Say what the trainer of a domain removed."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(_ANSWERS + request, domain, msgspec.json.encode(removed))
            pipe.pexpire(_ANSWERS + request, int(1000 * REMEMBERED_SECONDS))
            pipe.execute()

    def answers(self, request: str) -> dict[str, Removed]:
        """What the trainers said so far, by domain."""
        found: Any = self._client.hgetall(_ANSWERS + request)
        what = f"answers to the purge of {request}"
        return {domain.decode(): decoded(data, Removed, what) for domain, data in found.items()}

    def alive(self, domain: str) -> None:
        """Say that the trainer of a domain runs; it holds for five seconds."""
        self._client.set(_TRAINER + domain, b"1", px=_ALIVE_MS)

    def trainers(self) -> set[str]:
        """The domains whose trainer runs."""
        return {key.decode().removeprefix(_TRAINER) for key in self._client.scan_iter(_TRAINER + "*")}
