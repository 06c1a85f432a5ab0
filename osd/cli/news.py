"""What happens to the drafter versions, as lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from osd.registry.events import Events


class News:
    """What has happened since the first look, and what happens from then on."""

    def __init__(self, redis_url: str, domain: str) -> None:
        self._events, self._domain = Events(redis_url), domain
        self._told: list[dict[str, Any]] | None = None

    def new(self) -> Iterator[tuple[float, str]]:
        """The time of each event since the last look, and a line about it."""
        told = self._told
        try:
            recent = self._events.recent(20, steps=False)
        except RedisError:
            recent = told or []
        self._told = recent
        for event in recent:
            if told is not None and event not in told:
                reason = f": {event['reason']}" if event.get("reason") else ""
                of = "" if event["domain"] == self._domain else f" of {event['domain']}"
                yield event["time"], f"version {event['version']}{of} {event['kind'].replace('_', ' ')}{reason}"

    def close(self) -> None:
        """Close the connection."""
        self._events.close()


def line(at: float, what: str) -> str:
    """A line with the time that it is about."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}  {what}"
