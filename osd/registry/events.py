"""Events: what the loop did lately, for the dashboard and the command line."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, get_args

import msgspec
from redis.exceptions import DataError, RedisError

from osd.redis_client import RedisClient

logger = logging.getLogger(__name__)

Kind = Literal[
    "published",
    "rejected",
    "canary",
    "promoted",
    "swapped",
    "rolled_back",
    "pinned",
    "unpinned",
    "drift",
    "revision",
    "keys_refused",
    "train_step",
    "investment",
]

MAX_EVENTS = 1000
"""Events kept of each of the two lists."""

MOST_TEXT = 1000
"""Characters of a text in an event; what is longer is cut."""

_MILESTONES, _STEPS = "osd:events", "osd:events:train_step"


class Events(RedisClient):
    """Two bounded lists in Redis, so that the many training steps never push out a swap; one round trip a method.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        """Append an event with the time of now and any JSON figures.

        Raises:
            ValueError: unknown kind, or figures that are named like the event's own fields.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"event kind {kind!r}: must be one of {', '.join(get_args(Kind))}")
        if "time" in figures:
            raise ValueError("event figure 'time': the event has a time of its own")
        cut = {name: value[:MOST_TEXT] if isinstance(value, str) else value for name, value in figures.items()}
        event = {"time": time.time(), "kind": kind, "domain": domain, "version": version, **cut}
        key = _STEPS if kind in ("train_step", "investment") else _MILESTONES
        with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(key, msgspec.json.encode(event))
            pipe.ltrim(key, 0, MAX_EVENTS - 1)
            pipe.execute()
        if key == _MILESTONES:
            fields = {"domain": domain, "version": version, **cut}
            logger.info("version %s of %s: %s", version, domain, kind, extra={"event": kind, "fields": fields})

    def tell(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        """``add`` for whoever goes on without Redis too: it is only logged then."""
        try:
            self.add(kind, domain, version, **figures)
        except RedisError as error:
            logger.warning("event %s of version %s is lost: %s", kind, version, error)

    def recent(self, count: int = MAX_EVENTS, steps: bool = True) -> list[dict[str, Any]]:
        """The last ``count`` events, oldest first, as ``{"time", "kind", "domain", "version", ...figures}``.

        At most so many milestones and so many training steps, which are left out without ``steps``.
        """
        if count < 1:
            return []
        with self._client.pipeline(transaction=False) as pipe:
            for key in (_MILESTONES, _STEPS) if steps else (_MILESTONES,):
                pipe.lrange(key, 0, count - 1)
            lists = pipe.execute()
        try:
            events = [msgspec.json.decode(data, type=dict[str, Any]) for part in lists for data in reversed(part)]
            return sorted(events, key=lambda event: event["time"])
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise DataError(f"event list: {error}") from None
