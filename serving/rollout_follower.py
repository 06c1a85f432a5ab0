"""Which drafters a replica runs: the one to start with, then the stable version and the canary of the pointer."""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from osd import drafters
from osd.config import Settings
from osd.drafters.acceptance_head import without_head
from osd.drafters.base import Drafter, DrafterError
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, Version, VersionError
from osd.runtime.device import one_core

if TYPE_CHECKING:
    from osd.engine.pool import DomainHandle

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
    except (RedisError, OSError) as error:
        logger.warning("the rollout pointer cannot be read, starting with the newest version: %s", error)
        rollout = None
    refused: set[int] = set()
    numbers = [info.number for info in registry.list(settings.domain)]
    for number in sorted(numbers, reverse=True):
        if rollout is not None and number > rollout.stable:
            continue
        try:
            version = registry.load(settings.domain, number)
            drafter = drafters.served(drafters.from_config(version.config, target_dir), settings)
            drafter.load_weights(version.weights)
        except (VersionError, DrafterError) as error:
            logger.error("drafter version %d is refused: %s", number, error)
            refused.add(number)
        else:
            return Start(drafter, number, refused)
    first = drafters.initial(settings.drafter, target_dir, settings.home_dir)
    return Start(drafters.served(first, settings), 0, refused)


class DrafterCache:
    """Drafters by the configuration that a version has: the weights of all versions alike belong to one of them."""

    def __init__(self, drafter: Drafter, settings: Settings, target_dir: Path) -> None:
        """Know the ``drafter`` that a replica started with, and make others beside the target in ``target_dir``."""
        self._settings, self._target_dir = settings, target_dir
        self._known = {_key(drafter.config()): drafter}

    def of(self, config: dict[str, Any]) -> Drafter:
        """The drafter that ``config`` describes.

        Raises:
            DrafterError: there is no such drafter for this target.
        """
        key = _key(config)
        if key not in self._known:
            self._known[key] = drafters.served(drafters.from_config(config, self._target_dir), self._settings)
        return self._known[key]


def _key(config: dict[str, Any]) -> str:
    return json.dumps(without_head(config), sort_keys=True)


@dataclass(frozen=True)
class Versions:
    """Where versions and their pointers are, who hears of them, and the drafters that they are for."""

    settings: Settings
    registry: Registry
    pointer: Pointer
    events: Events
    cache: DrafterCache


class Follower:
    """Does what a domain's rollout says: loads, checks and stages each new version beside decoding.

    A version that cannot be loaded or does not fit is refused: counted, logged, put on the events, and the running
    one stays. The requests of a canary that is refused are served by the stable version.
    """

    def __init__(self, domain: str, versions: Versions, handle: DomainHandle, stop: threading.Event) -> None:
        """Follow for ``domain`` with the drafters of ``handle``, until ``stop``."""
        self._domain, self._versions, self._handle, self._stop = domain, versions, handle, stop
        self.known_bad: set[int] = set()
        self.rejected = 0

    def follow(self, rollout: Rollout) -> None:
        """Bring the drafters to what ``rollout`` says."""
        # In this order, so that a canary that is promoted serves its share until it is swapped in for all.
        self._follow_stable(rollout.stable)
        self._follow_canary(rollout)

    def use(self, number: int, take: Callable[[Version], None]) -> bool:
        """Load a version for ``take``; False when it is refused."""
        try:
            take(self._versions.registry.load(self._domain, number))
        except (VersionError, DrafterError) as error:
            self.refuse(number, str(error))
        except Exception as error:
            # Whatever is wrong with a version, it must not end the thread that would load the next one.
            logger.exception("drafter version %d of %s cannot be loaded", number, self._domain)
            self.refuse(number, type(error).__name__)
        else:
            return True
        return False

    def refuse(self, number: int, reason: str) -> None:
        """Count a version that is not used, and say why."""
        self.rejected += 1
        logger.error("drafter version %d of %s is refused, what runs stays: %s", number, self._domain, reason)
        self._versions.events.tell("rejected", self._domain, number, reason=reason, stage="load")

    def _follow_stable(self, number: int) -> None:
        before = self._handle.drafter_version
        if number == before or number in self.known_bad:
            # Known bad only until the pointer moves: whoever points at it again wants it tried again.
            self.known_bad.discard(number)
            return

        def stage(version: Version) -> None:
            self._handle.stage(number, version.weights, self._versions.cache.of(version.config))

        if self.use(number, stage) and self._swapped(number):
            logger.info("drafter version %d is in service, before it %d", number, before)
            self._versions.events.tell("swapped", self._domain, number, previous=before)

    def _follow_canary(self, rollout: Rollout) -> None:
        number, running = rollout.canary, self._handle.canary_version

        def try_out(version: Version) -> None:
            self._handle.try_canary(rollout, version.weights, self._versions.cache.of(version.config))

        if number is None or number == rollout.stable or not rollout.share:
            if running is not None:
                self._handle.end_canary()
                logger.info("drafter version %d is no canary any more", running)
        elif number == running:
            self._handle.try_canary(rollout, None)
        elif self.use(number, try_out):
            logger.info("drafter version %d drafts for %.0f %% of requests", number, 100 * rollout.share)
        elif running is not None:
            self._handle.end_canary()

    def _swapped(self, number: int) -> bool:
        deadline = time.monotonic() + _SWAP_SECONDS
        while self._handle.drafter_version != number and time.monotonic() < deadline:
            if self._stop.wait(0.01):
                return False
        return self._handle.drafter_version == number


class Watcher(ABC):
    """Something that watches in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    @abstractmethod
    def rejected(self) -> int:
        """Versions that were refused."""

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5)

    @abstractmethod
    def _run(self) -> None:
        """Watch until ``_stop`` is set."""


class VersionWatcher(Watcher):
    """Follows the rollout pointer of the own domain in a thread; with Redis gone nothing changes."""

    def __init__(self, versions: Versions, handle: DomainHandle, start: Start) -> None:
        """Follow for the service's own domain; the versions that ``start`` refused are told of now."""
        super().__init__("version-watcher")
        self._domain, self._pointer = versions.settings.domain, versions.pointer
        self._follower = Follower(self._domain, versions, handle, self._stop)
        self._follower.known_bad.update(start.refused)

    @property
    def rejected(self) -> int:
        """See ``Watcher.rejected``."""
        return self._follower.rejected

    def _run(self) -> None:
        one_core()
        for number in sorted(self._follower.known_bad):
            self._follower.refuse(number, "refused when the replica started")
        for rollout in self._pointer.watch(self._domain, self._stop, POLL_SECONDS):
            self._follower.follow(rollout)
