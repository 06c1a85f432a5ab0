"""Health of an engine: whether its decoding steps end without errors."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_FAILED_STEPS = 5
"""Consecutive failed steps of an unhealthy engine: an error of one request ends with it, one of the device does not."""

MAX_FAILED_REQUESTS = 64
"""Consecutive failed requests of an unhealthy engine: a few may be at fault themselves, but not as many as this."""

MIN_LIMIT_SECONDS = 60.0
"""Time that any step may take, for example to record CUDA graphs or on a busy machine."""

FIRST_STEP_SECONDS = 600.0
"""Time until the end of the first step, which includes calibration, compilation of kernels and page faults."""

LONGEST_STEP_FACTOR = 20.0
"""Limit of a step as a multiple of the longest step so far, if that is more than ``MIN_LIMIT_SECONDS``."""


class Health:
    """Reports of the engine's thread about its steps, and the verdict on them.

    Any thread may call ``check``. It takes no lock, because a step that hangs could hold the lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without work; ``clock`` returns seconds."""
        self._clock = clock
        self._since: float | None = None
        self._longest: float | None = None
        self._failed_steps, self._failed_requests, self._error = 0, 0, ""
        self._end = ""

    def begin_work(self) -> None:
        """Report that there is work: steps should end from now on."""
        if self._since is None:
            self._since = self._clock()

    def end_work(self) -> None:
        """Report that there is no work."""
        self._since = None

    @property
    def is_idle(self) -> bool:
        """Whether there is no work."""
        return self._since is None

    def step_ended(self) -> None:
        """Report a step without error."""
        now = self._clock()
        if self._since is not None:
            self._longest = max(self._longest or 0.0, now - self._since)
        self._since, self._failed_steps = now, 0

    def step_failed(self, error: str) -> None:
        """Report a step that failed with all of its requests."""
        self._since, self._error = self._clock(), error
        self._failed_steps += 1

    def request_ended(self) -> None:
        """Report a request that ended without error."""
        self._failed_requests = 0

    def request_failed(self, error: str) -> None:
        """Report a request that failed alone."""
        self._failed_requests, self._error = self._failed_requests + 1, error

    def decoding_ended(self, reason: str) -> None:
        """Report that the engine's thread has ended."""
        self._end = reason

    def check(self) -> None:
        """Raise RuntimeError with the reason if the engine should be replaced."""
        if self._end:
            raise RuntimeError(f"decoding has ended: {self._end}")
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"the last {self._failed_steps} decoding steps failed, the last one with {self._error}")
        if self._failed_requests >= MAX_FAILED_REQUESTS:
            raise RuntimeError(f"the last {self._failed_requests} requests failed, the last one with {self._error}")
        since, longest = self._since, self._longest
        waited = 0.0 if since is None else self._clock() - since
        if waited > (FIRST_STEP_SECONDS if longest is None else max(MIN_LIMIT_SECONDS, LONGEST_STEP_FACTOR * longest)):
            before = "none has ended before" if longest is None else f"the longest before took {longest:.1f} s"
            raise RuntimeError(f"no decoding step has ended for {waited:.0f} s while requests wait, {before}")
