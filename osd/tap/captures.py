"""What a tap keeps of requests: copies wait for a thread that reads them, and exchanges for Redis; answers never do."""

from __future__ import annotations

import logging
import queue
import random
import threading

from osd.capture import exchange
from osd.capture.exchange import Exchange
from osd.capture.writer import StreamWriter
from osd.config import Settings
from osd.tap.agreement import Served
from osd.tap.metrics import TapMetrics
from osd.tap.reading import Copy, PassedOver, exchanges_of

logger = logging.getLogger(__name__)

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


class Captures:
    """Captures what ``settings`` allow, until ``close``; ``begin`` and ``end`` of each answer take no time."""

    def __init__(self, settings: Settings, redis_url: str, served: Served, metrics: TapMetrics) -> None:
        self._settings, self._served, self._metrics = settings, served, metrics
        self._writer = StreamWriter[Exchange](redis_url, settings.tapped, exchange.encode, "exchanges")
        metrics.tell_written(self._writer.counters)
        self._waiting: queue.Queue[Copy | None] = queue.Queue(settings.tap.max_queue)
        self._thread = threading.Thread(target=self._run, name="tap-reading", daemon=True)
        self._thread.start()

    def begin(self, method: str, path: str) -> Copy | None:
        """What copies a request, None where it cannot be captured."""
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
        """Take a copy whose answer has ended."""
        try:
            self._waiting.put_nowait(copy)
        except queue.Full:
            self._metrics.unread.inc()

    def close(self) -> None:
        """Read and write what waits, for some seconds at most."""
        try:
            self._waiting.put(None, timeout=1)
            self._thread.join(5)
        except queue.Full:
            logger.warning("answers that were not read yet are not captured")
        self._writer.close()

    def counters(self) -> dict[str, int]:
        """Exchanges ``written`` to Redis, and ``dropped``."""
        return self._writer.counters()

    def _run(self) -> None:
        while (copy := self._waiting.get()) is not None:
            try:
                for one in exchanges_of(copy, self._settings, self._served):
                    self._writer.offer(one)
            except PassedOver as error:
                self._metrics.passed_over.labels(error.reason).inc()
            except Exception as error:
                # Its message may quote a user. Whatever an upstream sends, the next answer is read.
                logger.error("an answer could not be read: %s", type(error).__name__)
                self._metrics.passed_over.labels("unreadable").inc()
