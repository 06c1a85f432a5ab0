"""Exchange of routing outcomes between replicas: the speed of each domain's drafter on prompts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from osd.capture.retention import oldest_allowed
from osd.config import CaptureSettings
from osd.engine.request_router import RequestRouter
from osd.routing.outcome_stream import OutcomeStream

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class OutcomeSharer:
    """Thread that exchanges outcomes between the routers of replicas; without Redis each router learns alone."""

    def __init__(
        self,
        redis_url: str,
        settings: CaptureSettings,
        name: str,
        router: RequestRouter,
        is_purged: Callable[[str], bool] = lambda request: False,
    ) -> None:
        """Create the thread for the ``router`` of the replica ``name``; outcomes expire after ``capture.keep_days``.

        ``is_purged`` returns whether the request with an id was purged, so that its outcome is not published.
        """
        self._stream = OutcomeStream(redis_url)
        self._settings, self._name, self._router, self._is_purged = settings, name, router, is_purged
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcome-sharer", daemon=True)

    def start(self) -> None:
        """Start the thread; it first reads the recent outcomes of other replicas."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and publish the last outcomes."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._share()
        self._stream.close()

    def _run(self) -> None:
        self._share()
        while not self._stop.wait(_POLL_SECONDS):
            self._share()

    def _share(self) -> None:
        """Publish new outcomes of this replica and read new outcomes of other replicas."""
        try:
            if (oldest := oldest_allowed(self._settings, time.time())) is not None:
                self._stream.expire(oldest)
            while outcomes := self._router.outgoing:
                if not self._is_purged(outcomes[0].request_id):
                    self._stream.tell(outcomes[0], self._name)
                outcomes.popleft()
            self._router.incoming.extend(self._stream.new(self._name))
        except RedisError as error:
            if not self._failing:
                logger.warning("cannot share routing outcomes, trying again: %s", error)
            self._failing = True
        else:
            self._failing = False
