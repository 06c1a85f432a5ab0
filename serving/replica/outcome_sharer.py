"""Replicas tell each other which domain's drafter was how fast on which prompts."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import RedisError

from osd.capture.retention import oldest_allowed
from osd.config import CaptureSettings
from osd.engine.request_router import RequestRouter
from osd.routing.outcome_stream import OutcomeStream

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class OutcomeSharer:
    """Carries outcomes between a replica's router and the others', in a thread. Without Redis each learns by itself."""

    def __init__(self, redis_url: str, settings: CaptureSettings, name: str, router: RequestRouter) -> None:
        """Share what the ``router`` of the replica ``name`` learns, for as long as ``capture.keep_days`` says."""
        self._stream = OutcomeStream(redis_url)
        self._settings, self._name, self._router = settings, name, router
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcome-sharer", daemon=True)

    def start(self) -> None:
        """Begin; what others have told lately comes first."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell what was learnt last."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._share()
        self._stream.close()

    def _run(self) -> None:
        self._share()
        while not self._stop.wait(_LOOK_SECONDS):
            self._share()

    def _share(self) -> None:
        """Tell what there is to tell, and hear what others have told since the last call."""
        try:
            if (oldest := oldest_allowed(self._settings, time.time())) is not None:
                self._stream.expire(oldest)
            while told := self._router.told:
                self._stream.tell(told[0], self._name)
                told.popleft()
            self._router.heard.extend(self._stream.new(self._name))
        except RedisError as error:
            if not self._failing:
                logger.warning("what drafters were how fast is not shared, trying again: %s", error)
            self._failing = True
        else:
            self._failing = False
