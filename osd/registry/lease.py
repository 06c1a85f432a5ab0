"""The right to train a domain: one trainer has it, and whoever had it before can write nothing any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator

import msgspec

from osd.registry.pointer_file import PointerFiles, Rollout

SILENT_SECONDS = 60.0
"""After which a holder that says nothing has lost it: its machine is gone with the lock, or it hangs."""

VANISHED_SECONDS = 4.0
"""The same for one that is known not to live: what is silent here alone may have a slow disk."""

_TELL_SECONDS = 1.0

Elsewhere = Callable[[], bool | None]


class Lease:
    """A trainer's hold on a domain, for one thread: a lock that the kernel gives back, and a number that grows.

    The lock keeps a second trainer waiting. The number, ``fence``, is what makes it safe: it is written beside the
    rollout pointer, and ``held`` refuses a trainer that was thought to be gone and comes back.

    Raises:
        OSError: from ``take`` and ``held``: the disk does not give or take it.
    """

    def __init__(self, files: PointerFiles, domain: str, elsewhere: Elsewhere = lambda: None) -> None:
        """``elsewhere`` says whether another trainer that lives has the domain, None where that is not known.

        Where trainers do not see the same files, nothing else keeps the next one waiting.
        """
        self.fence = 0
        self._files, self._domain, self._elsewhere = files, domain, elsewhere
        self._path = files.storage.local / f".{domain}.trainer"
        self._descriptor: int | None = None
        self._beat, self._beat_at, self._told_at = 0, 0.0, -_TELL_SECONDS

    def take(self, rollout: Rollout) -> bool:
        """Become the domain's newest trainer, or stay it; False while another one lives.

        ``rollout`` is what the pointer says, for a domain that has nothing on disk yet.

        Raises:
            FencedError: another one has taken over.
        """
        if self.fence:
            self._files.check(self._domain, self.fence)
            return True
        mine, elsewhere = self._lock(), self._elsewhere()
        silence = VANISHED_SECONDS if elsewhere is False else SILENT_SECONDS
        if (elsewhere or not mine) and not self._silent(silence):
            return False

        def number(now: Rollout | None) -> Rollout:
            now = now or rollout
            return msgspec.structs.replace(now, fence=now.fence + 1)

        taken = self._files.update(self._domain, number)
        assert taken is not None  # noqa: S101  as ``number`` always makes one
        self.fence = taken.fence
        self.alive()
        return True

    def alive(self) -> None:
        """Say that this trainer goes on, once a second at most; nothing before it has taken the domain.

        Raises:
            FencedError: another one has taken over.
        """
        now = time.monotonic()
        if not self.fence or now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        with contextlib.suppress(OSError):  # it is said again, and ``held`` does not rely on it
            self._files.check(self._domain, self.fence)
            self._lock()  # which a silent one may still have had
            os.utime(self._path)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Write something while nobody can take over.

        Raises:
            FencedError: another one has taken over.
        """
        with self._files.locked(self._domain):
            self._files.check(self._domain, self.fence)
            yield

    def release(self) -> None:
        """Let the next one take it at once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> bool:
        """Whether the lock is this trainer's, now or before."""
        if self._descriptor is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    def _silent(self, seconds: float) -> bool:
        """Whether who has the domain has said nothing for so long, by this machine's clock alone."""
        beat, now = self._path.stat().st_mtime_ns, time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
        return now - self._beat_at > seconds
