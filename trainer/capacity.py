"""Training in what serving leaves over: lowest priority, short micro-steps, and a pause while requests wait."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from osd.config import TrainerSettings
from osd.registry.load_board import LoadBoard
from osd.target.threads import several_cores

logger = logging.getLogger(__name__)

LONGEST_STEP = 0.2
"""Seconds within which training yields: no micro-step should last longer."""

_SMALLEST = 32
_POLL = 0.05
_RETRY = 1.0


def lower_priority(threads: int) -> None:
    """Give the calling thread, and every thread that it starts, the lowest priority and ``threads`` cores."""
    # On Linux the niceness belongs to the thread, so that status calls stay quick.
    os.nice(19)
    several_cores(threads)


class Capacity:
    """Says when to train, and how many tokens at a time.

    ``tokens`` starts at ``trainer.micro_batch_tokens`` and never exceeds it. It shrinks when micro-steps come near to
    0.2 s and grows back slowly while they are short.
    """

    def __init__(self, board: LoadBoard, settings: TrainerSettings) -> None:
        self._board = board
        self._settings = settings
        self._unreadable_until = 0.0
        self._resting_until = 0.0
        self.tokens = settings.micro_batch_tokens
        self.reachable = True

    def serving_waits(self) -> bool:
        """Whether a request waits in some replica. With the board out of reach nobody is known to wait."""
        now = time.monotonic()
        if now < self._unreadable_until:
            return False
        try:
            loads = self._board.read()
        except RedisError as error:
            if self.reachable:
                logger.warning("the load board cannot be read, training goes on without it: %s", error)
            self.reachable = False
            self._unreadable_until = now + _RETRY
            return False
        self.reachable = True
        return any(load.waiting > 0 for load in loads.values())

    def wait(self, stop: threading.Event, paused: threading.Event, say: Callable[[str], None]) -> bool:
        """Return when a micro-step may run, or False when ``stop`` was set.

        Args:
            stop: ends the wait.
            paused: while set, nothing runs.
            say: told "paused" or "yielding" at each look.
        """
        while not stop.is_set():
            if paused.is_set():
                say("paused")
            elif self.serving_waits():
                say("yielding")
            elif (rest := self._resting_until - time.monotonic()) > 0:
                stop.wait(min(rest, _POLL))
                continue
            else:
                return True
            stop.wait(_POLL)
        return False

    def worked(self, seconds: float) -> None:
        """Learn from how long a micro-step took: adapt ``tokens``, and rest as ``trainer.duty`` says."""
        self._resting_until = time.monotonic() + seconds * (1 / self._settings.duty - 1)
        if seconds > 0.9 * LONGEST_STEP:
            # A single slow step may be the machine's fault, so that it never costs more than half.
            shrink = max(0.75 * LONGEST_STEP / seconds, 0.5)
            self.tokens = max(int(self.tokens * shrink), min(_SMALLEST, self._settings.micro_batch_tokens))
        elif seconds < 0.6 * LONGEST_STEP:
            self.tokens = min(int(self.tokens * 1.1) + 1, self._settings.micro_batch_tokens)
