"""Recent events of the learning loop, for the dashboard and the command line."""

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
    "fund",
]

MAX_EVENTS = 1000
"""Capacity of each of the two lists, in events."""

MAX_TEXT = 1000
"""Maximum length of a text in an event, in characters; longer texts are cut."""

_MILESTONES, _STEPS = "osd:events", "osd:events:train_step"


class Events(RedisClient):
    """Event log in two bounded Redis lists: training steps, and all other events ("milestones").

    Training steps are frequent. Their own list keeps them from pushing out a swap. Each method makes one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or the key holds data of another kind.
    """

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        """Append an event with the current time.

        Args:
            kind: the kind of event.
            domain: the domain of the event.
            version: the drafter version that the event is about, if any.
            figures: further values of the event, in any JSON type.

        Raises:
            ValueError: the kind is unknown, or a figure has the name of a field of the event.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"event kind {kind!r}: must be one of {', '.join(get_args(Kind))}")
        if "time" in figures:
            raise ValueError("event figure 'time': the name is reserved for the time of the event; use another name")
        figures = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in figures.items()}
        event = {"time": time.time(), "kind": kind, "domain": domain, "version": version, **figures}
        key = _STEPS if kind in ("train_step", "fund") else _MILESTONES
        with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(key, msgspec.json.encode(event))
            pipe.ltrim(key, 0, MAX_EVENTS - 1)
            pipe.execute()
        if key == _MILESTONES:
            fields = {"domain": domain, "version": version, **figures}
            logger.info("version %s of %s: %s", version, domain, kind, extra={"event": kind, "fields": fields})

    def try_add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        """Call ``add``, but log a warning instead of raising an error when Redis does not answer."""
        try:
            self.add(kind, domain, version, **figures)
        except RedisError as error:
            logger.warning("event %s of version %s is lost: %s", kind, version, error)

    def recent(self, count: int = MAX_EVENTS, steps: bool = True) -> list[dict[str, Any]]:
        """Return the last events, oldest first, as ``{"time", "kind", "domain", "version", ...figures}``.

        Args:
            count: the maximum number of milestones, and also of training steps.
            steps: whether to include training steps.
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
