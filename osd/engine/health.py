"""Whether an engine decodes: rounds that fail or hang are told to whoever can replace it."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILED_ROUNDS = 5
"""In a row that are too many: what one request breaks goes with it, what is wrong with the device fails every round."""

FAILED_REQUESTS = 64
"""In a row that are too many: one that fails by itself may be its own fault, so many after each other are not."""

LEAST_SECONDS = 60.0
"""That any round may take: one that records CUDA graphs, or has little of its cores, is no failure."""

FIRST_SECONDS = 600.0
"""Until the first round has ended: forwards are measured, kernels compiled and memory touched before."""

TIMES_LONGEST = 20.0
"""How much longer than the longest round so far one may take, where that is more than ``LEAST_SECONDS``."""


class Health:
    """What the engine's thread tells of its rounds, and what is to be made of it.

    Any thread may ``check``: nothing here waits for a lock, which a round that hangs could hold.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without work; ``clock`` counts seconds."""
        self._clock = clock
        self._since: float | None = None
        self._longest: float | None = None
        self._rounds, self._requests, self._why = 0, 0, ""
        self._end = ""

    def working(self) -> None:
        """There is work: from now on rounds are expected to end."""
        if self._since is None:
            self._since = self._clock()

    def resting(self) -> None:
        """There is no work."""
        self._since = None

    @property
    def rests(self) -> bool:
        """Whether there is no work, as it is in the beginning."""
        return self._since is None

    def round_ended(self) -> None:
        """A round has done its work."""
        now = self._clock()
        if self._since is not None:
            self._longest = max(self._longest or 0.0, now - self._since)
        self._since, self._rounds = now, 0

    def round_failed(self, why: str) -> None:
        """A round failed, with all of its requests."""
        self._since, self._why = self._clock(), why
        self._rounds += 1

    def request_ended(self) -> None:
        """A request came to its end."""
        self._requests = 0

    def request_failed(self, why: str) -> None:
        """A request failed, and no other with it."""
        self._requests, self._why = self._requests + 1, why

    def ended(self, why: str) -> None:
        """Nothing is decoded any more."""
        self._end = why

    def check(self) -> None:
        """Raise RuntimeError, with one sentence that says why, where the engine should be replaced."""
        if self._end:
            raise RuntimeError(f"decoding has ended: {self._end}")
        if self._rounds >= FAILED_ROUNDS:
            raise RuntimeError(f"the last {self._rounds} rounds of decoding failed, the last one with {self._why}")
        if self._requests >= FAILED_REQUESTS:
            raise RuntimeError(f"the last {self._requests} requests failed, the last one with {self._why}")
        since, longest = self._since, self._longest
        waited = 0.0 if since is None else self._clock() - since
        if waited > (FIRST_SECONDS if longest is None else max(LEAST_SECONDS, TIMES_LONGEST * longest)):
            before = "none has ended before" if longest is None else f"the longest before took {longest:.1f} s"
            raise RuntimeError(f"no round of decoding has ended for {waited:.0f} s while requests wait, {before}")
