"""Training in what serving leaves over: lowest priority, short micro-steps, and pauses while serving needs the machine.

Serving needs it while a request waits, and while the time between two tokens is above ``trainer.latency_objective_ms``.
A replica tells of waiting requests within 0.02 s and of its latency every 0.1 s, and micro-steps are kept to 0.15 s:
training yields within 200 ms of the first waiting request, and within 300 ms of a latency that is too long.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from osd.config import TrainerSettings
from osd.registry.load_board import LoadBoard
from osd.target.threads import several_cores

logger = logging.getLogger(__name__)

LONGEST_STEP = 0.15
"""Seconds that a micro-step should not exceed."""

_SMALLEST = 32
_POLL = 0.02
_RETRY = 1.0


def lower_priority(threads: int) -> None:
    """Give the calling thread, and every thread that it starts, the lowest priority and ``threads`` cores."""
    # On Linux the niceness belongs to the thread, so that status calls stay quick.
    os.nice(19)
    several_cores(threads)


class Capacity:
    """Says when to train, and how many tokens at a time.

    ``tokens`` starts at ``trainer.micro_batch_tokens`` and never exceeds it. It shrinks when micro-steps come near to
    0.15 s and grows back slowly while they are short.
    """

    def __init__(self, board: LoadBoard, settings: TrainerSettings) -> None:
        self._board = board
        self._settings = settings
        self._unreadable_until = 0.0
        self._resting_until = 0.0
        self.tokens = settings.micro_batch_tokens
        self.reachable = True

    def serving_needs(self) -> bool:
        """Whether in some replica a request waits, or tokens come slower than the objective allows.

        With the board out of reach nobody is known to need anything.
        """
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
        objective = self._settings.latency_objective_ms or math.inf
        return any(load.waiting > 0 or load.inter_token_ms > objective for load in loads.values())

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
            elif self.serving_needs():
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
