"""Which drafters a replica runs: the one to start with, then the stable version and the canary of the pointer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from osd import drafters
from osd.config import Settings
from osd.drafters.base import Drafter, DrafterError
from osd.registry.events import Events, Kind
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, Version, VersionError
from osd.target.threads import one_core

if TYPE_CHECKING:
    from osd.engine.engine import Engine

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
_SWAP_SECONDS = 30.0


@dataclass
class Start:
    """What a replica starts with: the drafter, its version (0: not from the registry), and what was refused."""

    drafter: Drafter
    version: int
    refused: set[int] = field(default_factory=set)


def starting_drafter(settings: Settings, registry: Registry, pointer: Pointer, target_dir: Path) -> Start:
    """Load the version in service, else the newest good one before it, else make the drafter's initial weights."""
    try:
        rollout = pointer.get(settings.domain)
    except RedisError as error:
        logger.warning("the rollout pointer cannot be read, starting with the newest version: %s", error)
        rollout = None
    refused: set[int] = set()
    numbers = [info.number for info in registry.list(settings.domain)]
    for number in sorted(numbers, reverse=True):
        if rollout is not None and number > rollout.stable:
            continue
        try:
            version = registry.load(settings.domain, number)
            drafter = _judging(drafters.from_config(version.config, target_dir), settings)
            drafter.load_weights(version.weights)
        except (VersionError, DrafterError) as error:
            logger.error("drafter version %d is refused: %s", number, error)
            refused.add(number)
        else:
            return Start(drafter, number, refused)
    return Start(_judging(drafters.initial(settings.drafter, target_dir, settings.home_dir), settings), 0, refused)


def _judging(drafter: Drafter, settings: Settings) -> Drafter:
    """With the head that the configured growth asks, so that a later version's can be swapped in."""
    if settings.growth.kind == "acceptance_head":
        drafter.add_acceptance_head()
    return drafter


class VersionWatcher:
    """Follows the rollout pointer in a thread: loads, checks and stages each new version beside decoding.

    A version that cannot be loaded or does not fit is refused: counted, logged, put on the events, and the running
    one stays. The requests of a canary that is refused are served by the stable version. With Redis gone nothing
    changes.
    """

    def __init__(
        self, settings: Settings, registry: Registry, pointer: Pointer, events: Events, engine: Engine, start: Start
    ) -> None:
        self._domain, self._engine = settings.domain, engine
        self._registry, self._pointer, self._events = registry, pointer, events
        self._known_bad = set(start.refused)
        self.rejected = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="version-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        one_core()
        for number in sorted(self._known_bad):
            self._refuse(number, "refused when the replica started")
        for rollout in self._pointer.watch(self._domain, self._stop, POLL_SECONDS):
            self._follow(rollout)

    def _follow(self, rollout: Rollout) -> None:
        # In this order, so that a canary that is promoted serves its share until it is swapped in for all.
        self._follow_stable(rollout.stable)
        self._follow_canary(rollout)

    def _follow_stable(self, number: int) -> None:
        before = self._engine.drafter_version
        if number == before or number in self._known_bad:
            # Known bad only until the pointer moves: whoever points at it again wants it tried again.
            self._known_bad.discard(number)
            return
        if self._use(number, lambda version: self._engine.stage(number, version.weights)) and self._swapped(number):
            logger.info("drafter version %d is in service, before it %d", number, before)
            self._tell("swapped", number, previous=before)

    def _follow_canary(self, rollout: Rollout) -> None:
        number, running = rollout.canary, self._engine.canary_version
        if number is None or number == rollout.stable or not rollout.share:
            if running is not None:
                self._engine.end_canary()
                logger.info("drafter version %d is no canary any more", running)
        elif number == running:
            self._engine.try_canary(rollout, None)
        elif self._use(number, lambda version: self._engine.try_canary(rollout, version.weights)):
            logger.info("drafter version %d drafts for %.0f %% of requests", number, 100 * rollout.share)
        elif running is not None:
            self._engine.end_canary()

    def _use(self, number: int, take: Callable[[Version], None]) -> bool:
        """Load a version for ``take``; False when it is refused."""
        try:
            take(self._registry.load(self._domain, number))
        except (VersionError, DrafterError) as error:
            self._refuse(number, str(error))
        except Exception as error:
            # Whatever is wrong with a version, it must not end the thread that would load the next one.
            logger.exception("drafter version %d cannot be loaded", number)
            self._refuse(number, type(error).__name__)
        else:
            return True
        return False

    def _swapped(self, number: int) -> bool:
        deadline = time.monotonic() + _SWAP_SECONDS
        while self._engine.drafter_version != number and time.monotonic() < deadline:
            if self._stop.wait(0.01):
                return False
        return self._engine.drafter_version == number

    def _refuse(self, number: int, reason: str) -> None:
        self.rejected += 1
        stays = self._engine.drafter_version
        logger.error("drafter version %d is refused, version %d stays: %s", number, stays, reason)
        self._tell("rejected", number, reason=reason, stage="load")

    def _tell(self, kind: Kind, number: int, **figures: Any) -> None:
        try:
            self._events.add(kind, self._domain, number, **figures)
        except RedisError as error:
            logger.warning("event %s of version %d is lost: %s", kind, number, error)
