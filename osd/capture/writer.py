"""Records from a process to the streams of their domains: traces from the engine, exchanges from a tap."""

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
from osd.capture.budget import Budget, BudgetShare
from osd.capture.retention import Retention
from osd.capture.streams import counter_key, index_key, stream_of
from osd.capture.trace import Trace, encode, rounded_bytes
from osd.config import CaptureSettings, in_tenant, tenant_of
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 128 << 20
"""Of the records that wait for Redis: with hidden states one may take several megabytes."""

_LOOK_SHARE = 1 / 32  # of capture.max_records and capture.keep_mb
_SWEEP_SECONDS = 10.0
_LATEST = (1 << 63) - 1

# The number is a counter that starts at the time in milliseconds: ids stay in order when the counter or the whole
# database is lost, and when somebody adds entries with ids of the server's own.
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
    """Puts records on their domains' streams from its own thread; every one offered is written or counted as dropped.

    With Redis gone or out of memory records are dropped, not kept: the newest traffic is worth more than a backlog.
    The thread also takes off the streams what ``Retention`` no longer allows.
    """

    def __init__(self, url: str, settings: CaptureSettings, encode: Callable[[Kind], bytes], called: str) -> None:
        """Write what ``encode`` makes of records, which the log has ``called`` so, to the Redis at ``url``.

        ``encode`` may raise TypeError, ValueError and OverflowError.
        """
        self._settings, self._encode, self._called = settings, encode, called
        self._client = connect(url, timeout=1.0)
        self._add = self._client.register_script(_ADD)
        self._retention = Retention(self._client, settings)
        self._backlog: Backlog[Kind] = Backlog(settings.max_queue, BACKLOG_BYTES)
        self._lock = threading.Lock()
        self._written = self._bytes = 0
        self._lost: Counter[str] = Counter()
        self._unlooked = [0, 0]  # records and bytes written since the last look at how much there is
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run, name=f"{called}-writer", daemon=True)
        self._thread.start()

    def offer(self, record: Kind) -> bool:
        """Queue a record without ever blocking; False when it was dropped because the writer is closed.

        Where the queue is full the oldest make room, and are dropped.
        """
        try:
            dropped = self._backlog.put(record)
        except ClosedError:
            self._lose("closed", 1)
            return False
        self._lose("queue", dropped)
        return True

    def counters(self) -> dict[str, int]:
        """Records ``written`` to Redis and ``dropped``, since the start; what the budget leaves out is neither."""
        with self._lock:
            dropped = sum(count for reason, count in self._lost.items() if reason != "budget")
            return {"written": self._written, "dropped": dropped}

    def losses(self) -> dict[str, int]:
        """Records that were not written, by reason, since the start.

        ``queue``: it was full; ``closed``: they came too late; ``encoding``: they cannot be written down; ``redis``: it
        did not take them; ``budget``: they were not drawn.
        """
        with self._lock:
            return dict(self._lost)

    @property
    def bytes_written(self) -> int:
        """Of all records since the start."""
        with self._lock:
            return self._bytes

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds, and count the rest as dropped."""
        self._backlog.close()
        self._thread.join(timeout)
        # A thread that is still in a call to Redis ends after that call.
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
                    self._retain(enforce, "old %s could not be deleted, trying again: %s")
                sweep_at = time.monotonic() + _SWEEP_SECONDS
        self._client.close()

    def _lose(self, reason: str, count: int) -> None:
        if count:
            with self._lock:
                self._lost[reason] += count

    def _drawn(self, record: Kind) -> Kind | None:
        """What is written of a record, None for nothing; on the writer's thread. It may raise what ``encode`` may."""
        return record

    def _write(self, offered: Kind) -> None:
        if self._backoff.remaining:
            return self._lose("redis", 1)
        prefix = self._settings.stream
        try:
            record = self._drawn(offered)
            if record is None:
                return self._lose("budget", 1)
            data, stream = self._encode(record), stream_of(prefix, record.domain)
            made = min(max(int(1000 * record.created), 0), _LATEST)
        except (TypeError, ValueError, OverflowError) as error:
            logger.error("one of the %s cannot be encoded, dropped: %s", self._called, type(error).__name__)
            return self._lose("encoding", 1)
        try:
            keys = [stream, counter_key(stream), index_key(prefix)]
            self._add(keys=keys, args=[self._settings.max_records, data, made, record.domain])
        except RedisError as error:
            if not self._backoff.failing:
                logger.warning("%s are dropped, Redis does not take them: %s", self._called, error)
            self._backoff.failed()
            if _out_of_memory(error):
                # A quarter of all records: under noeviction nothing else would ever free memory.
                self._retain(partial(self._retention.give_up, 1 / 4), "the streams of %s cannot be trimmed: %s")
            return self._lose("redis", 1)
        if self._backoff.failing:
            logger.info("Redis takes %s again", self._called)
        self._backoff.worked()
        with self._lock:
            self._written += 1
            self._bytes += len(data)
        self._keep_small(len(data))
        return None

    def _keep_small(self, written: int) -> None:
        """Look how much there is whenever a 32nd part of what is allowed was ``written`` since."""
        records, largest = self._settings.max_records, self._settings.keep_mb
        self._unlooked = [self._unlooked[0] + 1, self._unlooked[1] + written]
        many = self._unlooked[0] >= records * _LOOK_SHARE
        if not many and (largest is None or self._unlooked[1] < (largest << 20) * _LOOK_SHARE):
            return
        self._unlooked = [0, 0]
        self._retain(self._retention.shrink, "the streams of %s cannot be kept small: %s")

    def _retain(self, delete: Callable[[], object], failed: str) -> None:
        """Delete records; where Redis does not answer, log that it ``failed``."""
        try:
            delete()
        except RedisError as error:
            logger.warning(failed, self._called, error)


class RecallWriter(StreamWriter[Trace]):
    """Puts what tables of recall learn from traces on the streams of these tables, for other replicas.

    That is the ids and the most probable tokens of the target, a hundredth of a trace with hidden states: it is written
    whatever the budget leaves of traces.
    """

    def __init__(self, url: str, settings: CaptureSettings, replica: str, kept: int) -> None:
        """Write to the Redis at ``url``, in the name of ``replica``; a table keeps so many tokens of an entry."""
        self._kept = kept
        super().__init__(
            url, settings, lambda trace: encode(msgspec.structs.replace(trace, replica=replica)), "recalled texts"
        )

    def _drawn(self, record: Trace) -> Trace:
        return record.for_recall(in_tenant(tenant_of(record.domain), record.drafter_domain), self._kept)


class TraceWriter(StreamWriter[Trace]):
    """Puts traces on the streams: all of them, or a sample that keeps to ``capture.bytes_per_second``."""

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        replica: str = "",
        score: Callable[[Trace], float] = lambda trace: 1.0,
        recalled: RecallWriter | None = None,
        noted: Callable[[Trace], object] = lambda trace: None,
    ) -> None:
        """Write to the Redis at ``url``, in the name of ``replica``.

        Where not all can be kept, ``score``, above 0 and at most 1, says how much a trace is wanted beside others;
        ``noted`` hears of every trace. Both are called by the writer's thread. ``recalled`` is offered every trace too,
        and closed with this.
        """
        own, all_writers = settings.bytes_per_second, settings.service_bytes_per_second
        rates = [rate for rate in (own, all_writers) if rate is not None]
        self._most = own or math.inf
        self._budget = Budget(min(rates), score) if rates else None
        self._share: BudgetShare | None = None
        self._recalled, self._noted = recalled, noted
        super().__init__(url, settings, lambda trace: encode(msgspec.structs.replace(trace, replica=replica)), "traces")
        if all_writers is not None:
            self._share = BudgetShare(self._client, settings.stream, replica, all_writers)

    def offer(self, record: Trace) -> bool:
        if self._recalled is not None:
            self._recalled.offer(record)
        return super().offer(record)

    def losses(self) -> dict[str, int]:
        """See ``StreamWriter``; those of what is recalled by the same reasons with ``recall_`` before them."""
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
                budget.rate = min(self._most, self._share.look(budget.demand))
            except RedisError as error:
                logger.debug("the budget of other writers is not known, the share stays: %s", error)
        weight = budget.weight(record, name, self._size(record))
        return None if weight is None else msgspec.structs.replace(self._rounded(record), weight=weight)

    def _rounded(self, record: Trace) -> Trace:
        return record.with_rounded_states() if self._settings.states == "int8" else record

    def _size(self, record: Trace) -> int:
        """Bytes of what would be written of it."""
        if self._settings.states == "full" or record.hidden is None:
            return record.nbytes
        return record.nbytes - len(record.hidden.data) + rounded_bytes(*record.hidden.shape)


def _out_of_memory(error: RedisError) -> bool:
    # From within a script the server's code for it is inside the message.
    return isinstance(error, OutOfMemoryError) or "OOM command" in str(error)
