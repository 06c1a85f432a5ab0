"""Capture of exchanges: a thread parses copies of requests and answers and writes them to Redis.

The proxy never waits for this thread.
"""

from __future__ import annotations

import logging
import queue
import random
import threading

from osd.capture import exchange
from osd.capture.exchange import Exchange
from osd.capture.writer import StreamWriter
from osd.config import Settings
from osd.tap.agreement import ServedTarget
from osd.tap.metrics import TapMetrics
from osd.tap.reading import Copy, NotCapturedError, exchanges_of

logger = logging.getLogger(__name__)

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


class Captures:
    """Capture of the exchanges that ``settings`` allow, until ``close``; ``begin`` and ``end`` never block."""

    def __init__(self, settings: Settings, redis_url: str, served: ServedTarget, metrics: TapMetrics) -> None:
        self._settings, self._served, self._metrics = settings, served, metrics
        self._writer = StreamWriter[Exchange](redis_url, settings.tapped, exchange.encode, "exchanges")
        metrics.register_writer(self._writer.counters)
        self._waiting: queue.Queue[Copy | None] = queue.Queue(settings.tap.max_queue)
        self._thread = threading.Thread(target=self._run, name="tap-reading", daemon=True)
        self._thread.start()

    def begin(self, method: str, path: str) -> Copy | None:
        """Return a buffer for a request and its answer; None if the request is not captured."""
        if method != "POST" or path not in (_CHAT, _TEXT):
            return None
        reason = None
        if not self._settings.capture.enabled:
            reason = "policy"
        elif random.random() >= self._settings.tap.share:  # noqa: S311 - a sample, no secret
            reason = "share"
        if reason is not None:
            self._metrics.passed_over.labels(reason).inc()
            return None
        return Copy(path == _CHAT, self._settings.tap.max_bytes)

    def end(self, copy: Copy) -> None:
        """Queue a copy whose answer has ended."""
        try:
            self._waiting.put_nowait(copy)
        except queue.Full:
            self._metrics.unread.inc()

    def close(self) -> None:
        """Parse and write the queued copies, for at most six seconds."""
        try:
            self._waiting.put(None, timeout=1)
            self._thread.join(5)
        except queue.Full:
            logger.warning("the queue of answers is full: its answers are not captured")
        self._writer.close()

    def counters(self) -> dict[str, int]:
        """Return the number of exchanges ``written`` to Redis and ``dropped``."""
        return self._writer.counters()

    def _run(self) -> None:
        while (copy := self._waiting.get()) is not None:
            try:
                for captured in exchanges_of(copy, self._settings, self._served):
                    self._writer.offer(captured)
            except NotCapturedError as error:
                self._metrics.passed_over.labels(error.reason).inc()
            except Exception as error:
                # The message may quote a user, so log the type only. The thread must survive any answer.
                logger.error("an answer could not be parsed: %s", type(error).__name__)
                self._metrics.passed_over.labels("unreadable").inc()
