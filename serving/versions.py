"""Which drafter a replica runs: the one to start with, and the newer ones that the rollout pointer names."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from osd import drafters
from osd.config import Settings
from osd.drafters.base import Drafter, DrafterError
from osd.registry.events import Events, Kind
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, VersionError
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
            drafter = drafters.from_config(version.config, target_dir)
            drafter.load_weights(version.weights)
        except (VersionError, DrafterError) as error:
            logger.error("drafter version %d is refused: %s", number, error)
            refused.add(number)
        else:
            return Start(drafter, number, refused)
    return Start(drafters.initial(settings.drafter, target_dir, settings.home_dir), 0, refused)


class VersionWatcher:
    """Follows the rollout pointer in a thread: loads, checks and stages each new version beside decoding.

    A version that cannot be loaded or does not fit is refused: counted, logged, put on the events, and the running
    one stays. With Redis gone nothing changes.
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
        number, before = rollout.stable, self._engine.drafter_version
        if number == before or number in self._known_bad:
            # Known bad only until the pointer moves: whoever points at it again wants it tried again.
            self._known_bad.discard(number)
            return
        try:
            version = self._registry.load(self._domain, number)
            self._engine.stage(number, version.weights)
        except (VersionError, DrafterError) as error:
            self._refuse(number, str(error))
            return
        except Exception as error:
            # Whatever is wrong with a version, it must not end the thread that would load the next one.
            logger.exception("drafter version %d cannot be loaded", number)
            self._refuse(number, type(error).__name__)
            return
        if self._swapped(number):
            logger.info("drafter version %d is in service, before it %d", number, before)
            self._tell("swapped", number, previous=before)

    def _swapped(self, number: int) -> bool:
        deadline = time.monotonic() + _SWAP_SECONDS
        while self._engine.drafter_version != number and time.monotonic() < deadline:
            if self._stop.wait(0.01):
                return False
        return self._engine.drafter_version == number

    def _refuse(self, number: int, reason: str) -> None:
        self.rejected += 1
        logger.error(
            "drafter version %d is refused, version %d stays: %s", number, self._engine.drafter_version, reason
        )
        self._tell("rejected", number, reason=reason, stage="load")

    def _tell(self, kind: Kind, number: int, **figures: Any) -> None:
        try:
            self._events.add(kind, self._domain, number, **figures)
        except RedisError as error:
            logger.warning("event %s of version %d is lost: %s", kind, number, error)
