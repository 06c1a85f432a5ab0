"""Rollouts and replacements of the services of a follower."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from osd.registry.events import Events, Kind
from osd.registry.pointer import Rollout


def at(number: int, canary: int | None = None, share: float = 0.5, changed: float = 1.0, **more: int) -> Rollout:
    """Return a rollout of a stable version, and of a canary with its share; ``more`` are further fields."""
    return Rollout(number, canary, share if canary else 0.0, changed, **more)


class SingleDrafterCache:
    """Drafter cache that returns None for every configuration."""

    def of(self, config: dict[str, Any]) -> None:
        return None


class RecordingEvents(Events):
    """Events that are recorded in memory, or that fail as without Redis."""

    def __init__(self, failing: bool = False) -> None:
        self.failing = failing
        self.events: list[tuple[str, int | None]] = []
        self.reasons: list[Any] = []
        self.domains: list[str] = []

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        if self.failing:
            raise RedisConnectionError
        self.events.append((kind, version))
        self.reasons.append(figures.get("reason"))
        self.domains.append(domain)
