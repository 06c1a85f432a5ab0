"""Records from the stream into the replay buffer, and their acknowledgement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from osd.capture.retention import belongs
from osd.capture.stream import TraceReader
from osd.capture.trace import Trace, TraceError
from osd.config import Settings
from osd.learning.batch import check
from osd.learning.buffers import Key
from osd.learning.gate import MIN_POSITIONS
from osd.learning.replay import Replay
from trainer.status import Status

logger = logging.getLogger(__name__)

ENOUGH_TOKENS = 2 * MIN_POSITIONS
"""Completion tokens until which more is held out than ``trainer.held_out`` says."""

_READ_RECORDS = 16
_DAY = 86_400.0
_EXPIRE_SECONDS = 30.0


class Intake:
    """Follows the stream as a consumer group of the domain, at least once for each record.

    A record is finished once it was trained on, kept as held-out, refused, or pushed out of the replay buffer, and
    ``acknowledge`` tells the stream of all that are. Call it only when a checkpoint on disk contains that training.

    Args:
        settings: of the service.
        redis_url: where the stream is.
        vocabulary: number of the target's ids.
        status: where records are counted.
        observe: told of each new record, held out or not, in the order of arrival.

    Attributes:
        purged: requests that are refused.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        vocabulary: int,
        status: Status,
        observe: Callable[[Trace], None],
    ) -> None:
        trainer = settings.trainer
        self.replay = Replay(trainer.replay_tokens, trainer.held_out, anchors=trainer.anchors, enough=ENOUGH_TOKENS)
        ages = [days * _DAY for days in (trainer.replay_days, settings.capture.keep_days) if days is not None]
        self._oldest = min(ages, default=None)
        self.purged: set[str] = set()
        self._expire_at = 0.0
        self._every_domain = trainer.domains == "all"
        self._observe = observe
        self._domain = settings.domain
        self._target = settings.target.source
        self._vocabulary = vocabulary
        self._status = status
        self._reader = TraceReader(redis_url, settings.capture, group=f"trainer-{self._domain}", consumer="trainer")
        self._unfinished: dict[Key, list[str]] = {}
        self._finished: list[str] = []

    @property
    def finished(self) -> int:
        """Records that could be acknowledged."""
        return len(self._finished)

    def read(self, width: int, wait_ms: int) -> int:
        """Take what the stream has; returns how many completion tokens there are to train on that were not before.

        Args:
            width: taps * hidden of the drafter in training.
            wait_ms: longest wait for a first record.
        """
        tokens = sum(self._take(d.id, d.trace, width) for d in self._reader.read(_READ_RECORDS, wait_ms))
        if time.monotonic() >= self._expire_at:
            self._expire_at = time.monotonic() + _EXPIRE_SECONDS
            self._reader.sweep()
            if self._oldest is not None:
                self.finish(self.replay.expire(time.time() - self._oldest))
        return tokens

    def purge(self, asked: str) -> int:
        """Forget a request, and refuse what still comes of it; returns how many records there were."""
        self.purged.add(asked)
        gone = self.replay.purge(lambda request_id: belongs(request_id, asked))
        self.finish(gone)
        return len(gone)

    def finish(self, keys: Iterable[Key]) -> None:
        """These records were trained on, or are no longer there."""
        for key in keys:
            self._finished += self._unfinished.pop(key, [])

    def acknowledge(self) -> None:
        """Tell the stream that finished records need not be delivered again."""
        self._reader.ack(self._finished)
        self._finished.clear()

    def lag(self) -> int:
        """Records of the stream that are not acknowledged."""
        return self._reader.lag()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()

    def _take(self, stream_id: str, trace: Trace, width: int) -> int:
        foreign = trace.domain != self._domain and not self._every_domain
        purged = any(belongs(trace.request_id, asked) for asked in self.purged)
        if foreign or purged or (self._oldest is not None and trace.created < time.time() - self._oldest):
            self._finished.append(stream_id)
            return 0
        try:
            if trace.target != self._target:
                raise TraceError(f"it is of the target {trace.target}, not of {self._target}")
            check(trace, self._vocabulary, width)
        except TraceError as error:
            logger.warning("a record was refused: %s", error)
            self._status.refused += 1
            self._finished.append(stream_id)
            return 0
        key = (trace.request_id, trace.segment)
        added = self.replay.add(trace)
        if added.part == "duplicate":
            if self.replay.is_fresh(key):
                self._unfinished[key].append(stream_id)
            else:
                self._finished.append(stream_id)
            return 0
        self._unfinished[key] = [stream_id]
        self._status.records += 1
        self._observe(trace)
        self.finish(added.left)
        if added.part == "held_out":
            self._status.held_out += 1
            self.finish([key])
            return 0
        return trace.completion_ids.shape[0]
