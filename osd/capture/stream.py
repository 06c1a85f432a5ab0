"""Records through a bounded Redis Stream: traces from the engine to the trainer, exchanges from a tap to the labeller.

An entry has one field, ``t``: the msgpack bytes of the record. Its id counts the entries, so that the lag of a reader
can be told without reading what it has not read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from osd.capture.backlog import Backlog, ClosedError, Kind
from osd.capture.retention import Retention
from osd.capture.trace import FIELD, Trace, decode, encode
from osd.config import CaptureSettings
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 128 << 20
"""Of the records that wait for Redis: with hidden states one may take several megabytes."""

_READ_TIMEOUT = 5.0  # seconds
_LONGEST_WAIT_MS = 2000
_LOOK_SHARE = 1 / 32  # of capture.keep_mb
_FIRST_SWEEP_SECONDS, _SWEEP_SECONDS = 0.5, 10.0
_MANY = 10_000

# The id is a counter that starts at the time in milliseconds: ids stay in order when the counter or the whole
# database is lost, and when somebody adds entries with ids of the server's own.
_ADD = """
local function add(n)
  return redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], string.format('%.0f-0', n), 't', ARGV[2])
end
local n = redis.call('INCR', KEYS[2])
local id = n > 1 and add(n)
if not id or (type(id) == 'table' and string.find(id.err, 'equal or smaller', 1, true)) then
  local now = redis.call('TIME')
  n = now[1] * 1000 + math.floor(now[2] / 1000) + 1
  redis.call('SET', KEYS[2], string.format('%.0f', n))
  id = add(n)
end
return id
"""


def counter_key(stream: str) -> str:
    """The key that holds the number of the newest entry."""
    return f"{stream}:count"


class StreamWriter(Generic[Kind]):
    """Puts records on a stream from a thread of its own; every one offered is written or counted as dropped.

    With Redis gone or out of memory records are dropped, not kept: the newest traffic is worth more than a backlog.
    The thread also takes off the stream what ``capture.keep_days`` and ``capture.keep_mb`` no longer allow.
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
        self._written = 0
        self._dropped = 0
        self._unlooked = 0  # bytes written since the last look at the size of the stream
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
            self._count_dropped(1)
            return False
        self._count_dropped(dropped)
        return True

    def counters(self) -> dict[str, int]:
        """Records ``written`` to Redis and ``dropped``, since the start."""
        with self._lock:
            return {"written": self._written, "dropped": self._dropped}

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds, and count the rest as dropped."""
        self._backlog.close()
        self._thread.join(timeout)
        # A thread that is still in a call to Redis ends after that call.
        self._count_dropped(self._backlog.clear())

    def _run(self) -> None:
        sweep_at = time.monotonic() + _FIRST_SWEEP_SECONDS
        while not self._backlog.finished:
            record = self._backlog.take(max(0.0, sweep_at - time.monotonic()))
            if record is not None:
                if not self._backoff.remaining and self._write(record):
                    with self._lock:
                        self._written += 1
                else:
                    self._count_dropped(1)
            if time.monotonic() >= sweep_at:
                self._sweep()
                sweep_at = time.monotonic() + _SWEEP_SECONDS
        self._client.close()

    def _count_dropped(self, count: int) -> None:
        with self._lock:
            self._dropped += count

    def _write(self, record: Kind) -> bool:
        stream = self._settings.stream
        try:
            data = self._encode(record)
        except (TypeError, ValueError, OverflowError) as error:
            logger.error("one of the %s cannot be encoded, dropped: %s", self._called, type(error).__name__)
            return False
        try:
            self._add(keys=[stream, counter_key(stream)], args=[self._settings.max_records, data])
        except RedisError as error:
            if not self._backoff.failing:
                logger.warning("%s are dropped, Redis does not take them: %s", self._called, error)
            self._backoff.failed()
            if _out_of_memory(error):
                self._make_room()
            return False
        if self._backoff.failing:
            logger.info("Redis takes %s again", self._called)
        self._backoff.worked()
        self._keep_small(len(data))
        return True

    def _keep_small(self, written: int) -> None:
        """Look how large the stream is whenever a part of what it may take was ``written`` since."""
        largest = self._settings.keep_mb
        self._unlooked += written
        if largest is None or self._unlooked < (largest << 20) * _LOOK_SHARE:
            return
        self._unlooked = 0
        try:
            self._retention.shrink()
        except RedisError as error:
            logger.warning("the stream of %s cannot be kept small: %s", self._called, error)

    def _sweep(self) -> None:
        try:
            if not self._backoff.remaining:
                self._retention.enforce(time.time())
        except RedisError as error:
            logger.warning("old %s could not be deleted, trying again: %s", self._called, error)

    def _make_room(self) -> None:
        """Give up the oldest quarter of the stream: under noeviction nothing else would ever free memory."""
        try:
            kept = self._client.xlen(self._settings.stream) * 3 // 4
            self._client.xtrim(self._settings.stream, maxlen=kept, approximate=False)
        except RedisError as error:
            logger.warning("the stream of %s cannot be trimmed: %s", self._called, error)


class TraceWriter(StreamWriter[Trace]):
    """Puts traces on the stream."""

    def __init__(self, url: str, settings: CaptureSettings, replica: str = "") -> None:
        """Write to the Redis at ``url``, in the name of ``replica``."""
        super().__init__(url, settings, lambda trace: encode(msgspec.structs.replace(trace, replica=replica)), "traces")


def _out_of_memory(error: RedisError) -> bool:
    # From within a script the server's code for it is inside the message.
    return isinstance(error, OutOfMemoryError) or "OOM command" in str(error)


@dataclass(frozen=True)
class Delivered(Generic[Kind]):
    """A record with the id to acknowledge it by."""

    id: str
    record: Kind


class StreamReader(Generic[Kind]):
    """Reads records as one consumer of a group, at least once each, for one thread.

    A record that was delivered and not acknowledged comes again: to the same ``consumer`` name first after a restart,
    else to whoever finds it idle for ``min_idle_ms``. With Redis gone ``read`` gives nothing and goes on when it is
    back; a lost group is made again from the oldest record kept.
    """

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        group: str,
        consumer: str,
        decode: Callable[[bytes], Kind],
        min_idle_ms: int = 60_000,
    ) -> None:
        """Read what ``decode`` makes of the bytes, which raises ValueError where they are no such record."""
        self._stream, self._record_of = settings.stream, decode
        self._group = group
        self._consumer = consumer
        self._min_idle_ms = min_idle_ms
        # Batches are large: traces with hidden states take about a megabyte each.
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._retention = Retention(self._client, settings)
        self._backoff = Backoff()
        self._joined = False
        self._claimed: deque[str] = deque()  # pending with us, but not yet given to the caller
        self._in_flight: set[str] = set()  # given to the caller, not yet acknowledged
        self._acks: list[str] = []  # acknowledged by the caller, not yet known to Redis
        self._next_claim = 0.0
        self._lag = 0
        self._counts = {"read": 0, "reclaimed": 0, "undecodable": 0, "trimmed": 0}

    def read(self, max_records: int, block_ms: int) -> list[Delivered[Kind]]:
        """Take up to ``max_records`` records, waiting at most ``block_ms`` milliseconds for the first.

        Returns early with what is there; an empty list when nothing came or Redis is gone.
        """
        deadline = time.monotonic() + block_ms / 1000
        while True:
            left = deadline - time.monotonic()
            if self._backoff.remaining > max(0.0, left):
                time.sleep(max(0.0, left))
                return []
            time.sleep(self._backoff.remaining)
            batch = self._try_read(max_records, deadline)
            if batch or time.monotonic() >= deadline:
                return batch

    def ack(self, ids: Iterable[str]) -> None:
        """Acknowledge records; while Redis is gone this is kept and sent later."""
        known = [id for id in ids if id in self._in_flight]
        self._in_flight.difference_update(known)
        self._acks += known
        if not self._backoff.remaining:
            try:
                self._send_acks()
            except RedisError as error:
                self._failed(error)

    def sweep(self) -> None:
        """Take off the stream what the settings no longer allow; while Redis is gone this waits."""
        if self._backoff.remaining:
            return
        try:
            self._retention.enforce(time.time())
        except RedisError as error:
            self._failed(error)

    def lag(self) -> int:
        """Records that are not acknowledged: never delivered (and not trimmed away), or pending.

        While Redis is gone it is the figure last seen.
        """
        if self._backoff.remaining:
            return self._lag
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.xlen(self._stream)
                pipe.get(counter_key(self._stream))
                pipe.xinfo_groups(self._stream)
                length, newest, groups = pipe.execute(raise_on_error=False)
        except RedisError as error:
            self._failed(error)
            return self._lag
        if isinstance(groups, ResponseError):  # no stream yet
            groups = []
        if isinstance(length, Exception) or isinstance(newest, Exception):
            return self._lag
        mine = next((group for group in groups if group["name"].decode() == self._group), None)
        if mine is None:
            self._lag = length
        else:
            delivered = int(mine["last-delivered-id"].partition(b"-")[0])
            self._lag = min(length, max(0, int(newest or 0) - delivered)) + mine["pending"]
        return self._lag

    def counters(self) -> dict[str, int]:
        """Records ``read``, of them ``reclaimed``; ``undecodable`` ones; ``trimmed`` before they were acknowledged."""
        return dict(self._counts)

    def close(self) -> None:
        """Send what is acknowledged and close the connections."""
        with contextlib.suppress(RedisError):
            self._send_acks()
        self._client.close()

    def _try_read(self, max_records: int, deadline: float) -> list[Delivered[Kind]]:
        try:
            if not self._joined:
                self._join()
            self._send_acks()
            self._claim_idle()
            entries = self._fetch_claimed(max_records)
            if not entries:
                # Redis takes 0 as for ever; a wait longer than the socket's would look like a dead server.
                wait = min(int(1000 * (deadline - time.monotonic())), _LONGEST_WAIT_MS)
                block = wait if wait > 0 else None
                reply: Any = self._client.xreadgroup(
                    self._group, self._consumer, {self._stream: ">"}, count=max_records, block=block
                )
                entries = reply[0][1] if reply else []
            batch = self._decode(entries)
        except RedisError as error:
            self._failed(error)
            return []
        self._backoff.worked()
        return batch

    def _failed(self, error: RedisError) -> None:
        if isinstance(error, ResponseError) and "NOGROUP" in str(error):
            logger.warning("consumer group %s of %s is lost", self._group, self._stream)
        elif not self._backoff.failing:
            logger.warning("%s cannot be read from Redis, trying again: %s", self._stream, error)
        # Redis may come back as another, empty server: join again, which changes nothing where the group is there.
        self._joined = False
        self._backoff.failed()

    def _join(self) -> None:
        try:
            self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        else:
            logger.info("consumer group %s of %s made, from the oldest record kept", self._group, self._stream)
            self._in_flight.clear()
            self._acks.clear()
        mine: Any = self._client.xpending_range(
            self._stream, self._group, min="-", max="+", count=_MANY, consumername=self._consumer
        )
        known = self._in_flight.union(self._acks)
        self._claimed = deque(id for entry in mine if (id := entry["message_id"].decode()) not in known)
        self._joined = True

    def _send_acks(self) -> None:
        if self._acks:
            self._client.xack(self._stream, self._group, *self._acks)
            self._acks.clear()

    def _claim_idle(self) -> None:
        """Take what dead consumers hold; taking our own records in flight marks them as alive."""
        if time.monotonic() < self._next_claim:
            return
        ids: Any = self._client.xautoclaim(
            self._stream, self._group, self._consumer, self._min_idle_ms, start_id="0-0", count=_MANY, justid=True
        )
        known = self._in_flight.union(self._claimed)
        self._claimed.extend(id for raw in ids if (id := raw.decode()) not in known)
        self._next_claim = time.monotonic() + self._min_idle_ms / 2000

    def _fetch_claimed(self, max_records: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if not self._claimed:
            return []
        ids = [self._claimed[i] for i in range(min(max_records, len(self._claimed)))]
        with self._client.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.xrange(self._stream, min=id, max=id)
            found = [entry for reply in pipe.execute() for entry in reply]
        # Trimming takes an entry off the stream but leaves it pending.
        trimmed = set(ids).difference(id.decode() for id, _ in found)
        if trimmed:
            self._client.xack(self._stream, self._group, *trimmed)
            self._counts["trimmed"] += len(trimmed)
        for _ in ids:
            self._claimed.popleft()
        self._counts["reclaimed"] += len(found)
        return found

    def _decode(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Delivered[Kind]]:
        batch: list[Delivered[Kind]] = []
        bad: list[str] = []
        for raw, fields in entries:
            id, data = raw.decode(), fields.get(FIELD, b"")
            try:
                batch.append(Delivered(id, self._record_of(data)))
            except ValueError:
                # Neither the bytes nor the error are logged: both may quote a user.
                logger.warning("record %s of %s (%d bytes) cannot be read, skipped", id, self._stream, len(data))
                bad.append(id)
        self._in_flight.update(delivered.id for delivered in batch)
        self._counts["read"] += len(batch)
        self._counts["undecodable"] += len(bad)
        self._acks += bad  # sent with the next call: a failure here must not lose the batch
        return batch


class TraceReader(StreamReader[Trace]):
    """Reads traces."""

    def __init__(
        self, url: str, settings: CaptureSettings, group: str, consumer: str, min_idle_ms: int = 60_000
    ) -> None:
        super().__init__(url, settings, group, consumer, decode, min_idle_ms)
