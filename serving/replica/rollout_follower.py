"""Drafter versions of a replica: the version to start with, then the stable version and canary of the pointer."""

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
from osd.engine.build import InitialDrafter
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


def starting_drafter(settings: Settings, registry: Registry, pointer: Pointer, target_dir: Path) -> InitialDrafter:
    """Return the drafter that a replica starts with.

    It is the stable version of the pointer if that can be loaded, otherwise the newest earlier version that can be
    loaded, otherwise a drafter with initial weights. Without a readable pointer the newest version is tried first.
    """
    try:
        rollout = pointer.get(settings.domain)
    except (RedisError, OSError) as error:
        logger.warning("cannot read the rollout pointer, starting with the newest version: %s", error)
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
            logger.error("cannot load drafter version %d: %s", number, error)
            if isinstance(error, DrafterError):
                refused.add(number)
        else:
            return InitialDrafter(drafter, number, refused)
    initial = drafting.initial(settings.drafter, target_dir, settings.cache_dir)
    return InitialDrafter(drafting.served(initial, settings), 0, refused)


def _numbers(registry: Registry, domain: str, rollout: Rollout | None) -> list[int]:
    """Return the numbers of a domain's versions.

    If the storage cannot be listed, return only the stable version, which may be in the local cache.
    """
    try:
        return registry.numbers(domain)
    except OSError as error:
        logger.warning("cannot list the drafter versions of %s: %s", domain, error)
        return [] if rollout is None else [rollout.stable]


class DrafterCache:
    """Drafters by configuration; versions with the same configuration share a drafter.

    The cache keeps the most recently used drafters: two per domain, for the stable version and the canary.
    """

    def __init__(self, drafter: Drafter, settings: Settings, target_dir: Path) -> None:
        """Create a cache that contains the ``drafter`` of the start; ``target_dir`` is the directory of the target."""
        self._settings, self._target_dir, self._limit = settings, target_dir, 2 * settings.engine.domains
        self._drafters = {_key(drafter.config()): drafter}

    def of(self, config: dict[str, Any]) -> Drafter:
        """Return the drafter with the configuration ``config``.

        Raises:
            DrafterError: the configuration does not fit the target.
        """
        key = _key(config)
        drafter = self._drafters.pop(key, None)
        if drafter is None:
            drafter = drafting.served(drafting.from_config(config, self._target_dir), self._settings)
        self._drafters[key] = drafter  # the last entry is the most recently used
        if len(self._drafters) > self._limit:
            del self._drafters[next(iter(self._drafters))]
        return drafter


def _key(config: dict[str, Any]) -> str:
    return json.dumps(without_head(config), sort_keys=True)


@dataclass
class Uptake:
    """Cost of taking up new versions, for a replica with ``cores`` cores; the watchers of all domains share it."""

    cores: int = 1
    _versions: int = 0
    _seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, versions: int = 1) -> None:
        """Add the cost of taking up versions.

        Args:
            seconds: CPU seconds that reading, checking and staging took.
            versions: number of new versions; 0 for a reference, whose seconds count for the version that it measures.
        """
        with self._lock:
            self._versions += versions
            self._seconds += seconds

    def per_version(self, swaps: int, stall: float) -> float:
        """Return the mean core seconds per version.

        Args:
            swaps: number of swaps so far.
            stall: seconds that decoding steps waited for these swaps.
        """
        with self._lock:
            reading = self._seconds / self._versions if self._versions else 0.0
        return reading + (self.cores * stall / swaps if swaps else 0.0)


@dataclass(frozen=True)
class FollowerContext:
    """Services that all followers of a replica share."""

    settings: Settings
    registry: Registry
    pointer: Pointer
    events: Events
    cache: DrafterCache
    uptake: Uptake = field(default_factory=Uptake)


class DomainFollower:
    """Follower of one domain's rollout: it loads, checks and stages each new version while decoding continues.

    A version that does not fit is rejected: it is counted, logged and reported as an event once. It is tried again
    when the pointer returns to it, or is set again without a change. A damaged version is rejected too, but tried
    again after increasing pauses, because the file may be repaired. The same pauses follow temporary errors such as a
    disk that does not answer. Until then the running version stays, and the stable version drafts in place of a canary.
    """

    def __init__(self, domain: str, context: FollowerContext, handle: DomainHandle, stop: threading.Event) -> None:
        """Create a follower.

        Args:
            domain: domain whose rollout to follow.
            context: services of the replica.
            handle: drafters of the domain.
            stop: event that interrupts waiting for a swap.
        """
        self._domain, self._context, self._handle, self._stop = domain, context, handle, stop
        self._rollout: Rollout | None = None
        self._retries: dict[int, tuple[int, float]] = {}  # by version: number of failures, time of the next try
        self._reported: set[int] = set()  # versions in _retries that were reported as rejected
        self._late_swap: tuple[int, int] | None = None  # version whose swap timed out, and the version before it
        self.known_bad: set[int] = set()
        self.rejected = 0

    def follow(self, rollout: Rollout) -> None:
        """Bring the drafters of the domain to the state in ``rollout``."""
        before, self._rollout = self._rollout, rollout
        named = {rollout.stable, rollout.canary}
        if before is not None and _is_same(before, rollout) and before.moves != rollout.moves:
            named = set()  # an operator who sets the pointer without a change wants another try
        self.known_bad &= named
        self._reported &= named
        self._retries = {number: state for number, state in self._retries.items() if number in named}
        self._apply(rollout)

    @property
    def has_retries(self) -> bool:
        """Whether a version waits for another try."""
        return bool(self._retries)

    @property
    def is_retry_due(self) -> bool:
        """Whether the pause of such a version is over."""
        return any(time.monotonic() >= until for _, until in self._retries.values())

    def retry(self) -> None:
        """Try versions again whose pause is over."""
        if self._rollout is not None and self.is_retry_due:
            self._apply(self._rollout)

    def use(self, number: int, take: Callable[[Version], None]) -> bool:
        """Load a version and pass it to ``take``.

        Returns:
            False if the version was rejected, or waits for another try.
        """
        if time.monotonic() < self._retries.get(number, (0, 0.0))[1]:
            return False
        began = time.thread_time()
        try:
            take(self._context.registry.load(self._domain, number))
        except Exception as error:
            if _is_temporary(error):
                self._schedule_retry(number, f"it cannot be read now ({error})")
                return False
            if isinstance(error, VersionError):
                self._fail(number, str(error))
                return False
            self._retries.pop(number, None)
            if isinstance(error, DrafterError):
                self.reject(number, str(error))
            else:
                # An error of one version must not end the thread that loads the next version.
                logger.exception("cannot load drafter version %d of %s", number, self._domain)
                self.reject(number, type(error).__name__)
            return False
        self._context.uptake.add(time.thread_time() - began)
        return True

    def reject(self, number: int, reason: str) -> None:
        """Reject a version until the pointer moves; count, log and report it."""
        self.known_bad.add(number)
        self._report_rejected(number, reason)

    def _report_rejected(self, number: int, reason: str) -> None:
        self.rejected += 1
        logger.error("rejecting drafter version %d of %s, the running version stays: %s", number, self._domain, reason)
        self._context.events.try_add("rejected", self._domain, number, reason=reason, stage="load")

    def _fail(self, number: int, reason: str) -> None:
        """Report a version as rejected, once, and schedule another try."""
        if number not in self._reported:
            self._reported.add(number)
            self._report_rejected(number, reason)
        self._schedule_retry(number, reason)

    def _schedule_retry(self, number: int, reason: str) -> None:
        failures = self._retries.get(number, (0, 0.0))[0]
        pause = min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE)
        self._retries[number] = failures + 1, time.monotonic() + pause
        log = logger.debug if failures else logger.warning
        log("retrying drafter version %d of %s in %.0f s: %s", number, self._domain, pause, reason)

    def _apply(self, rollout: Rollout) -> None:
        # In this order a promoted canary drafts in its share of the steps until it is swapped in as stable version.
        self._follow_stable(rollout.stable)
        self._follow_canary(rollout)

    def _follow_stable(self, number: int) -> None:
        before = self._handle.drafter_version
        if self._late_swap is not None and self._late_swap[0] == before:
            self._report_swapped(*self._late_swap)
        if number == before:
            self._retries.pop(number, None)
        if number == before or number in self.known_bad:
            return

        def stage(version: Version) -> None:
            self._handle.stage(number, version.weights, self._context.cache.of(version.config))

        if self.use(number, stage):
            self._await_swap(number, before)

    def _await_swap(self, number: int, before: int) -> None:
        deadline = time.monotonic() + _SWAP_SECONDS
        while self._handle.drafter_version != number:
            reason = self._handle.swap_failure(number)
            if reason is None and time.monotonic() > deadline:
                reason, self._late_swap = f"no swap within {_SWAP_SECONDS:.0f} s", (number, before)
            if reason is not None:
                return self._fail(number, f"it cannot be swapped in ({reason})")
            if self._stop.wait(0.01):
                return None
        return self._report_swapped(number, before)

    def _report_swapped(self, number: int, before: int) -> None:
        self._late_swap = None
        self._retries.pop(number, None)
        logger.info("drafter version %d is in service and replaces version %d", number, before)
        self._context.events.try_add("swapped", self._domain, number, previous=before)
        settings = self._context.settings
        if 0 < before < number != self._handle.canary_version and settings.measures and not settings.drafter.mixes:
            self._refer(before)

    def _refer(self, number: int) -> None:
        """Compare the stable version with ``number``, the version before; without it the effect is not measured."""
        began = time.thread_time()
        try:
            version = self._context.registry.load(self._domain, number)
            self._handle.refer(number, version.weights, self._context.cache.of(version.config))
        except Exception as error:  # an error of one version must not end the thread that loads the next version
            logger.warning("the effect of the new version of %s is not measured: %s", self._domain, error)
        self._context.uptake.add(time.thread_time() - began, versions=0)

    def _follow_canary(self, rollout: Rollout) -> None:
        number, running = rollout.canary, self._handle.canary_version

        def start_canary(version: Version) -> None:
            self._handle.try_canary(rollout, version.weights, self._context.cache.of(version.config))

        if number is None or number == rollout.stable or not rollout.share:
            if running is not None:
                self._handle.end_canary()
                logger.info("drafter version %d is no longer a canary", running)
        elif number == running:
            self._handle.try_canary(rollout, None)
        elif number not in self.known_bad and self.use(number, start_canary):
            self._retries.pop(number, None)
            logger.info("drafter version %d drafts in %.0f %% of the steps", number, 100 * rollout.share)
        elif running is not None:
            self._handle.end_canary()


def _is_temporary(error: Exception) -> bool:
    """Return whether the machine failed and not the version, so that another try may succeed."""
    cause = error if isinstance(error, (OSError, MemoryError)) else error.__context__
    return isinstance(cause, (OSError, MemoryError)) and not isinstance(cause, FileNotFoundError)


class Watcher(ABC):
    """Base class of watchers that run in a thread."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    @abstractmethod
    def rejected(self) -> int:
        """Number of rejected versions."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it, at most 5 seconds."""
        self._stop.set()
        self._thread.join(timeout=5)

    @abstractmethod
    def _run(self) -> None:
        """Watch until ``_stop`` is set."""


class VersionWatcher(Watcher):
    """Watcher of the rollout pointer of the service's domain; without Redis the drafters stay as they are."""

    def __init__(self, context: FollowerContext, handle: DomainHandle, start: InitialDrafter) -> None:
        """Create the watcher; its thread first reports the versions that were refused at ``start``."""
        super().__init__("version-watcher")
        self._domain, self._pointer = context.settings.domain, context.pointer
        self._follower = DomainFollower(self._domain, context, handle, self._stop)
        self._follower.known_bad.update(start.refused)

    @property
    def rejected(self) -> int:
        return self._follower.rejected

    def _run(self) -> None:
        one_core()
        follower = self._follower
        for number in sorted(follower.known_bad):
            follower.reject(number, "refused when the replica started")
        for rollout in self._pointer.watch(self._domain, self._stop, POLL_SECONDS):
            follower.follow(rollout)
            while follower.has_retries and not self._stop.wait(POLL_SECONDS) and self._is_current(rollout):
                follower.retry()

    def _is_current(self, rollout: Rollout) -> bool:
        """Return whether the pointer has not moved since ``rollout``, or cannot be read."""
        try:
            current = self._pointer.get(self._domain)
        except (RedisError, OSError):
            return True
        return current is not None and current.moves <= rollout.moves


def _is_same(one: Rollout, other: Rollout) -> bool:
    """Return whether two states of a pointer name the same versions in the same way."""
    return replace(one, changed=other.changed, moves=other.moves, fence=other.fence) == other
