"""Writers of records to the streams of their domains: traces of the engine, exchanges of a tap."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic

import msgspec
from redis.exceptions import OutOfMemoryError, RedisError

from osd.capture.backlog import Backlog, ClosedError, Kind
from osd.capture.budget import BudgetShare, RecordSampler
from osd.capture.retention import Retention
from osd.capture.streams import counter_key, index_key, stream_of
from osd.capture.trace import Trace, encode, rounded_bytes
from osd.config import CaptureSettings, in_tenant, tenant_of
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 128 << 20
"""Capacity of the queue to Redis, in bytes; a record with hidden states may take several megabytes."""

_CHECK_SHARE = 1 / 32  # share of capture.max_records or capture.keep_mb to write between two checks of the size
_SWEEP_SECONDS = 10.0
_MAX_TIME = (1 << 63) - 1

# The number in an id is a counter that starts at the time in milliseconds. So ids stay in order after a loss of the
# counter or of the whole database, and after entries with automatic ids.
_ADD = """
local function add(n)
  local id = string.format('%.0f', n) .. '-' .. ARGV[3]
  return redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], id, 't', ARGV[2])
end
local now = redis.call('TIME')
local milliseconds = now[1] * 1000 + math.floor(now[2] / 1000)
local n = redis.call('INCR', KEYS[2])
local id = n > 1 and add(n)
if not id or (type(id) == 'table' and string.find(id.err, 'equal or smaller', 1, true)) then
  n = milliseconds + 1
  redis.call('SET', KEYS[2], string.format('%.0f', n))
  id = add(n)
end
if type(id) == 'string' then
  redis.call('ZADD', KEYS[3], string.format('%.0f', milliseconds), ARGV[4])
end
return id
"""


class StreamWriter(Generic[Kind]):
    """Writer of records to the streams of their domains, with its own thread.

    Each offered record is written or counted as dropped. While Redis does not answer or is out of memory, records are
    dropped, because new traffic is worth more than a backlog. The thread also applies the limits of ``Retention``.
    """

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        encode: Callable[[Kind], bytes],
        label: str,
        is_purged: Callable[[str], bool] = lambda request: False,
    ) -> None:
        """Start a writer.

        Args:
            url: the URL of Redis.
            settings: name and limits of the streams.
            encode: returns the bytes of a record; may raise TypeError, ValueError and OverflowError.
            label: the name of the records in log messages, in the plural.
            is_purged: returns whether the request with an id was purged, so that its records are not written.
        """
        self._settings, self._encode, self._label, self._is_purged = settings, encode, label, is_purged
        self._client = connect(url, timeout=1.0)
        self._add = self._client.register_script(_ADD)
        self._retention = Retention(self._client, settings)
        self._backlog: Backlog[Kind] = Backlog(settings.max_queue, BACKLOG_BYTES)
        self._lock = threading.Lock()
        self._written = self._bytes = 0
        self._lost: Counter[str] = Counter()
        self._unchecked = [0, 0]  # records and bytes written since the last check of the size
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run, name=f"{label}-writer", daemon=True)
        self._thread.start()

    def offer(self, record: Kind) -> bool:
        """Queue a record without blocking; return False when the writer is closed and the record is dropped.

        A full queue drops its oldest records. Records of a purged request are left out without being counted.
        """
        if self._is_purged(record.request_id):
            return True
        try:
            dropped = self._backlog.put(record)
        except ClosedError:
            self._lose("closed", 1)
            return False
        self._lose("queue", dropped)
        return True

    def counters(self) -> dict[str, int]:
        """Return the numbers of ``written`` and ``dropped`` records since the start.

        A record that the budget leaves out is neither.
        """
        with self._lock:
            dropped = sum(count for reason, count in self._lost.items() if reason != "budget")
            return {"written": self._written, "dropped": dropped}

    def losses(self) -> dict[str, int]:
        """Return the numbers of records that were not written since the start, by reason.

        ``queue``: the queue was full; ``closed``: the writer was closed; ``encoding``: the record cannot be encoded;
        ``redis``: Redis did not accept the record; ``budget``: the record was not drawn.
        """
        with self._lock:
            return dict(self._lost)

    @property
    def bytes_written(self) -> int:
        """Size in bytes of all records written since the start."""
        with self._lock:
            return self._bytes

    def close(self, timeout: float = 5.0) -> None:
        """Write the queued records for at most ``timeout`` seconds, and count the rest as dropped."""
        self._backlog.close()
        self._thread.join(timeout)
        # A thread that is still inside a call to Redis ends after that call.
        self._lose("closed", self._backlog.clear())

    def _run(self) -> None:
        sweep_at = time.monotonic()
        while not self._backlog.finished:
            record = self._backlog.take(max(0.0, sweep_at - time.monotonic()))
            if record is not None:
                self._write(record)
            if time.monotonic() >= sweep_at:
                if not self._backoff.remaining:
                    enforce = partial(self._retention.enforce, time.time())
                    self._retain(enforce, "old %s cannot be deleted; trying again: %s")
                sweep_at = time.monotonic() + _SWEEP_SECONDS
        self._client.close()

    def _lose(self, reason: str, count: int) -> None:
        if count:
            with self._lock:
                self._lost[reason] += count

    def _drawn(self, record: Kind) -> Kind | None:
        """Return the record to write, or None to write nothing; may raise the same errors as ``encode``.

        The writer's thread calls this method.
        """
        return record

    def _write(self, offered: Kind) -> None:
        if self._is_purged(offered.request_id):  # since the offer
            return None
        if self._backoff.remaining:
            return self._lose("redis", 1)
        prefix = self._settings.stream
        try:
            record = self._drawn(offered)
            if record is None:
                return self._lose("budget", 1)
            data, stream = self._encode(record), stream_of(prefix, record.domain)
            created = min(max(int(1000 * record.created), 0), _MAX_TIME)
        except (TypeError, ValueError, OverflowError) as error:
            logger.error("one of the %s cannot be encoded, dropped: %s", self._label, type(error).__name__)
            return self._lose("encoding", 1)
        try:
            keys = [stream, counter_key(stream), index_key(prefix)]
            self._add(keys=keys, args=[self._settings.max_records, data, created, record.domain])
        except RedisError as error:
            if not self._backoff.failing:
                logger.warning("%s are dropped, Redis does not take them: %s", self._label, error)
            self._backoff.failed()
            if _out_of_memory(error):
                # Under the policy noeviction only a deletion frees memory.
                self._retain(partial(self._retention.give_up, 1 / 4), "the streams of %s cannot be trimmed: %s")
            return self._lose("redis", 1)
        if self._backoff.failing:
            logger.info("Redis takes %s again", self._label)
        self._backoff.worked()
        with self._lock:
            self._written += 1
            self._bytes += len(data)
        self._keep_small(len(data))
        return None

    def _keep_small(self, written: int) -> None:
        """Trim the streams each time a 32nd of their limit was written.

        Args:
            written: the size of the latest record in bytes.
        """
        records, megabytes = self._settings.max_records, self._settings.keep_mb
        self._unchecked = [self._unchecked[0] + 1, self._unchecked[1] + written]
        is_due = self._unchecked[0] >= records * _CHECK_SHARE
        if not is_due and (megabytes is None or self._unchecked[1] < (megabytes << 20) * _CHECK_SHARE):
            return
        self._unchecked = [0, 0]
        self._retain(self._retention.shrink, "the streams of %s cannot be trimmed to their limits: %s")

    def _retain(self, delete: Callable[[], object], message: str) -> None:
        """Delete records; log ``message`` when Redis does not answer."""
        try:
            delete()
        except RedisError as error:
            logger.warning(message, self._label, error)


class RecallWriter(StreamWriter[Trace]):
    """Writer of reduced traces, from which the n-gram caches of other replicas learn.

    A reduced trace takes about a hundredth of a trace with hidden states, so the budget does not apply to it.
    """

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        replica: str,
        kept: int,
        is_purged: Callable[[str], bool] = lambda request: False,
    ) -> None:
        """Start a writer.

        Args:
            url: the URL of Redis.
            settings: name and limits of the streams.
            replica: the name of this replica.
            kept: the number of target tokens per entry of the n-gram cache.
            is_purged: see ``StreamWriter``.
        """
        self._kept = kept
        super().__init__(
            url,
            settings,
            lambda trace: encode(msgspec.structs.replace(trace, replica=replica)),
            "recalled texts",
            is_purged,
        )

    def _drawn(self, record: Trace) -> Trace:
        return record.for_recall(in_tenant(tenant_of(record.domain), record.drafter_domain), self._kept)


class TraceWriter(StreamWriter[Trace]):
    """Writer of traces: of all traces, or of a sample within ``capture.bytes_per_second``."""

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        replica: str = "",
        score: Callable[[Trace], float] = lambda trace: 1.0,
        recalled: RecallWriter | None = None,
        noted: Callable[[Trace], object] = lambda trace: None,
        is_purged: Callable[[str], bool] = lambda request: False,
    ) -> None:
        """Start a writer.

        Args:
            url: the URL of Redis.
            settings: name and limits of the streams, and the budget.
            replica: the name of this replica.
            score: returns the relative value of a trace, above 0 and at most 1; called by the writer's thread.
            recalled: a writer of reduced traces that gets every trace; it is closed with this writer.
            noted: called by the writer's thread with every trace.
            is_purged: see ``StreamWriter``.
        """
        writer_rate, service_rate = settings.bytes_per_second, settings.service_bytes_per_second
        rates = [rate for rate in (writer_rate, service_rate) if rate is not None]
        self._max_rate = writer_rate or math.inf
        self._budget = RecordSampler(min(rates), score) if rates else None
        self._share: BudgetShare | None = None
        self._recalled, self._noted = recalled, noted
        super().__init__(
            url,
            settings,
            lambda trace: encode(msgspec.structs.replace(trace, replica=replica)),
            "traces",
            is_purged,
        )
        if service_rate is not None:
            self._share = BudgetShare(self._client, settings.stream, replica, service_rate)

    def offer(self, record: Trace) -> bool:
        if self._recalled is not None:
            self._recalled.offer(record)
        return super().offer(record)

    def losses(self) -> dict[str, int]:
        """Return the losses of ``StreamWriter``, and those of reduced traces with the prefix ``recall_``."""
        recalled = {} if self._recalled is None else self._recalled.losses()
        return super().losses() | {f"recall_{reason}": count for reason, count in recalled.items()}

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        if self._recalled is not None:
            self._recalled.close(timeout)

    def _drawn(self, record: Trace) -> Trace | None:
        name = f"{record.request_id} {record.segment}"
        budget = self._budget
        self._noted(record)
        if budget is None:
            return self._rounded(record)
        if self._share is not None and self._share.due:
            try:
                budget.rate = min(self._max_rate, self._share.update(budget.demand))
            except RedisError as error:
                logger.debug("the demand of other writers is unknown; the share stays: %s", error)
        weight = budget.weight(record, name, self._size(record))
        return None if weight is None else msgspec.structs.replace(self._rounded(record), weight=weight)

    def _rounded(self, record: Trace) -> Trace:
        return record.with_rounded_states() if self._settings.states == "int8" else record

    def _size(self, record: Trace) -> int:
        """Return the size of a trace as it would be written, in bytes."""
        if self._settings.states == "full" or record.hidden is None:
            return record.nbytes
        return record.nbytes - len(record.hidden.data) + rounded_bytes(*record.hidden.shape)


def _out_of_memory(error: RedisError) -> bool:
    # After an error inside a script, the error code is a part of the message.
    return isinstance(error, OutOfMemoryError) or "OOM command" in str(error)
