"""Replicas tell each other which domain's drafter was how fast on which prompts."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.capture.retention import Retention
from osd.capture.trace import FIELD
from osd.config import CaptureSettings
from osd.engine.request_router import RequestRouter
from osd.redis_client import RedisClient
from osd.routing.outcome import STREAM, Outcome

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _CLEAR_SECONDS = 0.5, 60.0
_MOST = 512  # outcomes on the stream: what a new replica begins with
_BY = b"replica"

_encoder = msgspec.msgpack.Encoder()
_outcomes = msgspec.msgpack.Decoder(Outcome)


class OutcomeSharer(RedisClient):
    """Carries outcomes between a replica's router and the others', in a thread. Without Redis each learns by itself.

    What is older than ``capture.keep_days`` is deleted, and so is what is to be forgotten.
    """

    def __init__(self, redis_url: str, settings: CaptureSettings, name: str, router: RequestRouter) -> None:
        """Share what the ``router`` of the replica ``name`` learns."""
        super().__init__(redis_url)
        self._name, self._router = name, router
        self._retention = Retention(self._client, settings.model_copy(update={"stream": STREAM}))
        self._last, self._clear_at = "-", 0.0
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
        self._try_to_share()
        super().close()

    def share(self) -> None:
        """Tell what there is to tell, and hear what others have told since the last call.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        while told := self._router.told:
            fields: Any = {FIELD: _encoder.encode(told[0]), _BY: self._name}
            self._client.xadd(STREAM, fields, maxlen=_MOST, approximate=False)
            told.popleft()
        entries: Any = self._client.xrange(STREAM, min=self._last)
        for id, fields in entries:
            self._last = f"({id.decode()}"
            if fields.get(_BY) != self._name.encode():
                self._hear(fields.get(FIELD, b""))
        if time.monotonic() >= self._clear_at:
            self._clear_at = time.monotonic() + _CLEAR_SECONDS
            self._retention.enforce(time.time())

    def _hear(self, data: bytes) -> None:
        try:
            outcome = _outcomes.decode(data)
        except msgspec.MsgspecError:
            return
        if math.isfinite(outcome.gain):
            self._router.heard.append(outcome)

    def _run(self) -> None:
        self._try_to_share()
        while not self._stop.wait(_LOOK_SECONDS):
            self._try_to_share()

    def _try_to_share(self) -> None:
        try:
            self.share()
        except RedisError as error:
            if not self._failing:
                logger.warning("what drafters were how fast is not shared, trying again: %s", error)
            self._failing = True
        else:
            self._failing = False
