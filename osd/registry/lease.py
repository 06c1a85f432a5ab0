"""Exclusive right of one trainer to train a domain; a trainer that lost it can no longer write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator

import msgspec

from osd.files import make_directory
from osd.registry.pointer_file import PointerFiles, Rollout

SILENT_SECONDS = 60.0
"""Time without a heartbeat after which a holder loses the lease: its machine is gone, or the trainer hangs."""

VANISHED_SECONDS = 4.0
"""The same for a holder that is known to be dead. A short wait stays, because a slow disk may delay a heartbeat."""

_HEARTBEAT_SECONDS = 1.0

HasOtherTrainer = Callable[[], bool | None]
"""Function that returns whether another living trainer has the domain, or None when that is unknown."""


class Lease:
    """Lease of a trainer on a domain, for use by one thread.

    A kernel lock on a file keeps a second trainer waiting; the kernel frees it when the process dies. A growing
    number, ``fence``, gives safety: it is stored in the rollout pointer, and ``held`` refuses a trainer whose number
    is not the newest. So a trainer that was declared dead and comes back cannot write.

    Raises:
        OSError: from ``take`` and ``held``: the disk cannot be read or written.
    """

    def __init__(self, files: PointerFiles, domain: str, has_other_trainer: HasOtherTrainer = lambda: None) -> None:
        """Prepare a lease; ``take`` acquires it.

        Args:
            files: the pointer files, which store the fence.
            domain: the domain to train.
            has_other_trainer: returns whether another living trainer has the domain, or None when that is unknown. It
                is the only protection between trainers that share no files.
        """
        self.fence = 0
        self._files, self._domain, self._has_other_trainer = files, domain, has_other_trainer
        self._path = files.storage.local / f".{domain}.trainer"
        self._descriptor: int | None = None
        self._last_heartbeat, self._last_change, self._sent = 0, 0.0, -_HEARTBEAT_SECONDS

    def take(self, rollout: Rollout) -> bool:
        """Acquire the lease, or confirm it; return False while another living trainer has it.

        Args:
            rollout: the current rollout, to be written for a domain that has no pointer file yet.

        Raises:
            FencedError: this trainer had the lease, and another trainer has taken over.
        """
        if self.fence:
            self._files.check(self._domain, self.fence)
            return True
        has_lock, other = self._lock(), self._has_other_trainer()
        silence = VANISHED_SECONDS if other is False else SILENT_SECONDS
        if (other or not has_lock) and not self._is_silent(silence):
            return False

        def increment(current: Rollout | None) -> Rollout:
            current = current or rollout
            return msgspec.structs.replace(current, fence=current.fence + 1)

        taken = self._files.update(self._domain, increment)
        assert taken is not None  # noqa: S101  ``increment`` always returns a rollout
        self.fence = taken.fence
        self.alive()
        return True

    def alive(self) -> None:
        """Send a heartbeat, at most once a second; do nothing before the lease is taken.

        Raises:
            FencedError: another trainer has taken over.
        """
        now = time.monotonic()
        if not self.fence or now - self._sent < _HEARTBEAT_SECONDS:
            return
        self._sent = now
        with contextlib.suppress(OSError):  # the next heartbeat follows soon, and ``held`` does not depend on it
            self._files.check(self._domain, self.fence)
            self._lock()  # after a takeover the silent holder may have kept the lock until now
            os.utime(self._path)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keep other trainers from taking over while the caller writes.

        Raises:
            FencedError: another trainer has taken over.
        """
        with self._files.locked(self._domain):
            self._files.check(self._domain, self.fence)
            yield

    def release(self) -> None:
        """Free the lock, so that the next trainer need not wait."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> bool:
        """Try to lock the file; return whether this trainer has the lock."""
        if self._descriptor is not None:
            return True
        make_directory(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    def _is_silent(self, seconds: float) -> bool:
        """Return whether no heartbeat was seen for more than ``seconds``, by the clock of this machine."""
        heartbeat, now = self._path.stat().st_mtime_ns, time.monotonic()
        if heartbeat != self._last_heartbeat:
            self._last_heartbeat, self._last_change = heartbeat, now
        return now - self._last_change > seconds
