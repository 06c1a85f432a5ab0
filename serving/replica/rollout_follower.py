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

from msgspec.structs import replace
from redis.exceptions import RedisError

from osd import drafting
from osd.config import Settings
from osd.drafting.acceptance_head import without_head
from osd.drafting.base import Drafter, DrafterError
from osd.engine.build import Start
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, Version, VersionError
from osd.runtime.device import one_core

if TYPE_CHECKING:
    from osd.engine.pool import DomainHandle

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
_SWAP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def starting_drafter(settings: Settings, registry: Registry, pointer: Pointer, target_dir: Path) -> Start:
    """Load the version in service, else the newest good one before it, else make the drafter's initial weights."""
    try:
        rollout = pointer.get(settings.domain)
    except (RedisError, OSError) as error:
        logger.warning("the rollout pointer cannot be read, starting with the newest version: %s", error)
        rollout = None
    refused: set[int] = set()
    for number in reversed(_numbers(registry, settings.domain, rollout)):
        if rollout is not None and number > rollout.stable:
            continue
        try:
            version = registry.load(settings.domain, number)
            drafter = drafting.served(drafting.from_config(version.config, target_dir), settings)
            drafter.load_weights(version.weights)
        except (VersionError, DrafterError, OSError) as error:
            logger.error("drafter version %d is not used: %s", number, error)
            if isinstance(error, DrafterError):
                refused.add(number)
        else:
            return Start(drafter, number, refused)
    first = drafting.initial(settings.drafter, target_dir, settings.home_dir)
    return Start(drafting.served(first, settings), 0, refused)


def _numbers(registry: Registry, domain: str, rollout: Rollout | None) -> list[int]:
    """The versions that there are; while the storage does not say, the one in service, which a node may have kept."""
    try:
        return registry.numbers(domain)
    except OSError as error:
        logger.warning("the drafter versions of %s cannot be listed: %s", domain, error)
        return [] if rollout is None else [rollout.stable]


class DrafterCache:
    """Drafters by the configuration that a version has: the weights of all versions alike belong to one of them.

    Of two for each domain those that were asked for last are kept, for the stable version's and the canary's.
    """

    def __init__(self, drafter: Drafter, settings: Settings, target_dir: Path) -> None:
        """Know the ``drafter`` that a replica started with, and make others beside the target in ``target_dir``."""
        self._settings, self._target_dir, self._most = settings, target_dir, 2 * settings.engine.domains
        self._known = {_key(drafter.config()): drafter}

    def of(self, config: dict[str, Any]) -> Drafter:
        """The drafter that ``config`` describes.

        Raises:
            DrafterError: there is no such drafter for this target.
        """
        key = _key(config)
        drafter = self._known.pop(key, None)
        if drafter is None:
            drafter = drafting.served(drafting.from_config(config, self._target_dir), self._settings)
        self._known[key] = drafter  # behind all others
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return drafter


def _key(config: dict[str, Any]) -> str:
    return json.dumps(without_head(config), sort_keys=True)


@dataclass
class Uptake:
    """What new versions take a replica that computes on so many ``cores``; watchers of several domains share it."""

    cores: int = 1
    _versions: int = 0
    _seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        """A version took so many CPU seconds to be read, checked and staged."""
        with self._lock:
            self._versions += 1
            self._seconds += seconds

    def each(self, swaps: int, stall: float) -> float:
        """Seconds of a core that one took on average, where rounds waited ``stall`` seconds for so many ``swaps``."""
        with self._lock:
            reading = self._seconds / self._versions if self._versions else 0.0
        return reading + (self.cores * stall / swaps if swaps else 0.0)


@dataclass(frozen=True)
class Versions:
    """Where versions and their pointers are, who hears of them, the drafters that they are for, and what they take."""

    settings: Settings
    registry: Registry
    pointer: Pointer
    events: Events
    cache: DrafterCache
    uptake: Uptake = field(default_factory=Uptake)


class Follower:
    """Does what a domain's rollout says: loads, checks and stages each new version beside decoding.

    A version that is damaged or does not fit is refused: counted, logged and put on the events, once. One that does not
    fit is left alone until the pointer comes back to it or is set once more as it is. One that is damaged, which
    somebody may put right, and what may pass, such as a disk that does not answer, are tried again after ever longer
    pauses. Meanwhile the running version stays, and the stable version drafts in the steps of a canary.
    """

    def __init__(self, domain: str, versions: Versions, handle: DomainHandle, stop: threading.Event) -> None:
        """Follow for ``domain`` with the drafters of ``handle``, until ``stop``."""
        self._domain, self._versions, self._handle, self._stop = domain, versions, handle, stop
        self._rollout: Rollout | None = None
        self._pauses: dict[int, tuple[int, float]] = {}  # of versions to try again: how often it failed, and until when
        self._told: set[int] = set()  # versions to try again of which it was told that they are refused
        self._late: tuple[int, int] | None = None  # not swapped in yet, and the version before it
        self.known_bad: set[int] = set()
        self.rejected = 0

    def follow(self, rollout: Rollout) -> None:
        """Bring the drafters to what ``rollout`` says."""
        before, self._rollout = self._rollout, rollout
        named = {rollout.stable, rollout.canary}
        if before is not None and replace(before, changed=rollout.changed) == rollout:
            named = set()  # whoever sets the pointer to where it is wants that tried again
        self.known_bad &= named
        self._told &= named
        self._pauses = {number: pause for number, pause in self._pauses.items() if number in named}
        self._bring(rollout)

    @property
    def unfinished(self) -> bool:
        """Whether something is to be tried again."""
        return bool(self._pauses)

    @property
    def due(self) -> bool:
        """Whether it is to be tried now."""
        return any(time.monotonic() >= until for _, until in self._pauses.values())

    def again(self) -> None:
        """Try again what is due."""
        if self._rollout is not None and self.due:
            self._bring(self._rollout)

    def use(self, number: int, take: Callable[[Version], None]) -> bool:
        """Load a version for ``take``; False when it is refused, or to be tried again."""
        if time.monotonic() < self._pauses.get(number, (0, 0.0))[1]:
            return False
        began = time.thread_time()
        try:
            take(self._versions.registry.load(self._domain, number))
        except Exception as error:
            if _may_pass(error):
                self._pause(number, f"it cannot be read now ({error})")
                return False
            if isinstance(error, VersionError):
                self._fail(number, str(error))
                return False
            self._pauses.pop(number, None)
            if isinstance(error, DrafterError):
                self.refuse(number, str(error))
            else:
                # Whatever is wrong with a version, it must not end the thread that would load the next one.
                logger.exception("drafter version %d of %s cannot be loaded", number, self._domain)
                self.refuse(number, type(error).__name__)
            return False
        self._versions.uptake.add(time.thread_time() - began)
        return True

    def refuse(self, number: int, reason: str) -> None:
        """Count a version that is not used, and say why."""
        self.known_bad.add(number)
        self._tell_refused(number, reason)

    def _tell_refused(self, number: int, reason: str) -> None:
        self.rejected += 1
        logger.error("drafter version %d of %s is refused, what runs stays: %s", number, self._domain, reason)
        self._versions.events.tell("rejected", self._domain, number, reason=reason, stage="load")

    def _fail(self, number: int, reason: str) -> None:
        """Refuse a version for now, which is told once."""
        if number not in self._told:
            self._told.add(number)
            self._tell_refused(number, reason)
        self._pause(number, reason)

    def _pause(self, number: int, reason: str) -> None:
        failed = self._pauses.get(number, (0, 0.0))[0]
        pause = min(_FIRST_PAUSE * 2**failed, _LONGEST_PAUSE)
        self._pauses[number] = failed + 1, time.monotonic() + pause
        log = logger.debug if failed else logger.warning
        log("drafter version %d of %s is tried again in %.0f s: %s", number, self._domain, pause, reason)

    def _bring(self, rollout: Rollout) -> None:
        # In this order, so that a canary that is promoted drafts in its share until it is swapped in for all.
        self._follow_stable(rollout.stable)
        self._follow_canary(rollout)

    def _follow_stable(self, number: int) -> None:
        before = self._handle.drafter_version
        if self._late is not None and self._late[0] == before:
            self._tell_swapped(*self._late)
        if number == before:
            self._pauses.pop(number, None)
        if number == before or number in self.known_bad:
            return

        def stage(version: Version) -> None:
            self._handle.stage(number, version.weights, self._versions.cache.of(version.config))

        if self.use(number, stage):
            self._await_swap(number, before)

    def _await_swap(self, number: int, before: int) -> None:
        deadline = time.monotonic() + _SWAP_SECONDS
        while self._handle.drafter_version != number:
            why = self._handle.swap_failure(number)
            if why is None and time.monotonic() > deadline:
                why, self._late = f"no swap within {_SWAP_SECONDS:.0f} s", (number, before)
            if why is not None:
                return self._fail(number, f"it cannot be swapped in ({why})")
            if self._stop.wait(0.01):
                return None
        return self._tell_swapped(number, before)

    def _tell_swapped(self, number: int, before: int) -> None:
        self._late = None
        self._pauses.pop(number, None)
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
        elif number not in self.known_bad and self.use(number, try_out):
            self._pauses.pop(number, None)
            logger.info("drafter version %d drafts in %.0f %% of the steps", number, 100 * rollout.share)
        elif running is not None:
            self._handle.end_canary()


def _may_pass(error: Exception) -> bool:
    """Whether the same may work later: what failed is the machine, and not the version."""
    cause = error if isinstance(error, (OSError, MemoryError)) else error.__context__
    return isinstance(cause, (OSError, MemoryError)) and not isinstance(cause, FileNotFoundError)


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
        return self._follower.rejected

    def _run(self) -> None:
        one_core()
        follower = self._follower
        for number in sorted(follower.known_bad):
            follower.refuse(number, "refused when the replica started")
        for rollout in self._pointer.watch(self._domain, self._stop, POLL_SECONDS):
            follower.follow(rollout)
            while follower.unfinished and not self._stop.wait(POLL_SECONDS) and self._still(rollout):
                follower.again()

    def _still(self, rollout: Rollout) -> bool:
        """Whether the pointer has not moved on; while it cannot be read it has not."""
        try:
            return self._pointer.get(self._domain) == rollout
        except (RedisError, OSError):
            return True
