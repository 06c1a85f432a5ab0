"""Rollouts, and what hears of them in place of a registry's other parts."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError as RedisGone

from osd.registry.events import Events, Kind
from osd.registry.pointer import Rollout


def at(number: int, canary: int | None = None, share: float = 0.5, changed: float = 1.0) -> Rollout:
    """A rollout of a stable version, and of a canary with its share."""
    return Rollout(number, canary, share if canary else 0.0, changed)


class OneDrafter:
    """Weights of any version are for the drafter at hand."""

    def of(self, config: dict[str, Any]) -> None:
        return None


class ScriptedEvents(Events):
    """Keeps events by kind and version, their reasons and domains, or has no Redis for them."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone
        self.events: list[tuple[str, int | None]] = []
        self.reasons: list[Any] = []
        self.domains: list[str] = []

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        if self.gone:
            raise RedisGone
        self.events.append((kind, version))
        self.reasons.append(figures.get("reason"))
        self.domains.append(domain)
