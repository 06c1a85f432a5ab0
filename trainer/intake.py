"""Records from the stream into the replay buffer, and their acknowledgement."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from osd.capture.stream import TraceReader
from osd.capture.trace import Trace, TraceError
from osd.config import Settings
from osd.learning.batch import check
from osd.learning.replay import Key, Replay
from trainer.status import Status

logger = logging.getLogger(__name__)

_READ_RECORDS = 16


class Intake:
    """Follows the stream as a consumer group of the domain, at least once for each record.

    A record is finished once it was trained on, kept as held-out, refused, or pushed out of the replay buffer, and
    ``acknowledge`` tells the stream of all that are. Call it only when a checkpoint on disk contains that training.
    """

    def __init__(self, settings: Settings, redis_url: str, vocabulary: int, status: Status) -> None:
        self.replay = Replay(settings.trainer.replay_tokens, settings.trainer.held_out)
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
        return sum(self._take(d.id, d.trace, width) for d in self._reader.read(_READ_RECORDS, wait_ms))

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
        if trace.domain != self._domain:
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
        key = (trace.request_id, trace.piece)
        added = self.replay.add(trace)
        if added.part == "duplicate":
            if self.replay.is_fresh(key):
                self._unfinished[key].append(stream_id)
            else:
                self._finished.append(stream_id)
            return 0
        self._unfinished[key] = [stream_id]
        self._status.records += 1
        self.finish(added.left)
        if added.part == "held_out":
            self._status.held_out += 1
            self.finish([key])
            return 0
        return trace.completion_ids.shape[0]
