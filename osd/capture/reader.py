"""Reader of records from the streams of one or several domains, for training and labelling."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from redis.exceptions import RedisError, ResponseError

from osd.capture import exchange, trace
from osd.capture.backlog import Kind
from osd.capture.exchange import Exchange
from osd.capture.retention import Retention
from osd.capture.streams import NONE, Waiting, counter_key, domains_in, refused_key, stream_of, waiting
from osd.capture.trace import FIELD, RecordFormatError, Trace
from osd.config import CaptureSettings, tenant_of
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

_READ_TIMEOUT = 5.0  # seconds
_MAX_WAIT_MS = 2000
_STREAMS_SECONDS = 2.0  # interval between two reads of the list of streams
_MAX_PENDING = 10_000  # pending records per call to Redis
MAX_REFUSED = 100
"""Number of refused records that are kept: the last ones."""
_MAX_REFUSED_BYTES = 256 << 10  # of a larger record only the id is kept

# The id of a copy has the time of creation of the record, as all ids, so that copies expire with their records.
_KEEP_REFUSED = """
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return end
local fields = {'stream', KEYS[1], 'id', ARGV[1], 'reason', ARGV[2]}
if #entry[2][2] <= tonumber(ARGV[4]) then
  table.insert(fields, 't')
  table.insert(fields, entry[2][2])
end
local id = string.format('%.0f', redis.call('INCR', KEYS[3])) .. '-' .. string.match(ARGV[1], '%d+$')
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[3], id, unpack(fields))
"""


class Place(NamedTuple):
    """Address of a record: its stream and its id."""

    stream: str
    id: str


@dataclass(frozen=True)
class DeliveredRecord(Generic[Kind]):
    """Record with its address, which the caller acknowledges."""

    place: Place
    record: Kind


class StreamReader(Generic[Kind]):
    """Consumer in a Redis consumer group with at-least-once delivery, for use by one thread.

    A record that was delivered but not acknowledged is delivered again: after a restart to a consumer of the same name,
    otherwise to any consumer that finds it idle for ``min_idle_ms``. While Redis does not answer ``read`` returns no
    records. A lost group is created again from the oldest record on the stream.
    """

    decode: Callable[[bytes], Kind]
    """Function that decodes a record; raises ValueError for invalid bytes."""

    def __init__(
        self,
        url: str,
        settings: CaptureSettings,
        domain: str,
        group: str,
        consumer: str,
        *,
        min_idle_ms: int = 60_000,
        tenant: bool = False,
    ) -> None:
        """Create a consumer.

        Args:
            url: the URL of Redis.
            settings: name and limits of the streams.
            domain: the domain to read.
            group: the consumer group.
            consumer: the name of this consumer in the group.
            min_idle_ms: idle time after which records of another consumer are taken over.
            tenant: whether to read all domains of the domain's tenant.
        """
        self._prefix, self._domain = settings.stream, domain
        self._group, self._consumer = group, consumer
        self._min_idle_ms, self._tenant = min_idle_ms, tenant
        # Batches are large: traces with hidden states take about a megabyte each.
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._retention = Retention(self._client, settings)
        self._keep_refused = self._client.register_script(_KEEP_REFUSED)
        self._backoff = Backoff()
        self._joined: list[str] = []  # streams on which the group exists
        self._next_update = 0.0
        self._claimed: deque[Place] = deque()  # pending for this consumer, not yet returned to the caller
        self._in_flight: set[Place] = set()  # returned to the caller, not yet acknowledged
        self._acks: list[Place] = []  # acknowledged by the caller, not yet sent to Redis
        self._next_claim = 0.0
        self._waiting = NONE

    def read(self, max_records: int, block_ms: int) -> list[DeliveredRecord[Kind]]:
        """Return the available records, or wait for the first one.

        Args:
            max_records: the maximum number of records. With more streams than ``max_records``, the limit is one record
                of each stream.
            block_ms: the maximum time to wait for the first record, in milliseconds.

        Returns:
            The records; an empty list when none arrived or Redis does not answer.
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

    def ack(self, places: Iterable[Place]) -> None:
        """Acknowledge records that were returned by ``read``; ignore all other addresses.

        While Redis does not answer, the acknowledgements are kept and sent later.
        """
        known = [place for place in places if place in self._in_flight]
        self._in_flight.difference_update(known)
        self._acks += known
        if not self._backoff.remaining:
            try:
                self._send_acks()
            except RedisError as error:
                self._failed(error)

    def release(self, places: Iterable[Place]) -> None:
        """Return records that were returned by ``read`` again with the next calls; ignore all other addresses."""
        known = [place for place in places if place in self._in_flight]
        self._in_flight.difference_update(known)
        self._claimed.extend(known)

    def refuse(self, place: Place, reason: str) -> None:
        """Acknowledge a record that cannot be used, and copy it to the stream of refused records.

        Args:
            place: the address of the record.
            reason: the reason without text of users.
        """
        self._copy_refused(place, reason)
        self.ack([place])

    def sweep(self) -> None:
        """Delete records that the retention settings do not allow; do nothing while Redis does not answer."""
        if self._backoff.remaining:
            return
        try:
            self._retention.enforce(time.time())
        except RedisError as error:
            self._failed(error)

    def waiting(self) -> Waiting:
        """Return the unacknowledged records: undelivered ones that are still on the stream, and pending ones.

        While Redis does not answer, return the last known value.
        """
        if not self._backoff.remaining:
            try:
                self._waiting = waiting(self._client, self._joined or self._streams(), self._group)
            except RedisError as error:
                self._failed(error)
        return self._waiting

    def close(self) -> None:
        """Send the remaining acknowledgements and close the connections."""
        with contextlib.suppress(RedisError):
            self._send_acks()
        self._client.close()

    def _streams(self) -> list[str]:
        domains = [self._domain]
        if self._tenant:
            tenant = tenant_of(self._domain)
            known = domains_in(self._client, self._prefix)
            domains += [domain for domain in known if tenant_of(domain) == tenant and domain != self._domain]
        return [stream_of(self._prefix, domain) for domain in domains]

    def _try_read(self, max_records: int, deadline: float) -> list[DeliveredRecord[Kind]]:
        try:
            if time.monotonic() >= self._next_update:
                self._update_streams()
            self._send_acks()
            self._claim_idle()
            entries = self._fetch_claimed(max_records)
            if not entries:
                # For Redis, 0 means without end. A wait beyond the timeout of the socket would look like a dead server.
                wait = min(int(1000 * (deadline - time.monotonic())), _MAX_WAIT_MS)
                block = wait if wait > 0 else None
                # Redis applies the count to each stream.
                count = max(max_records // len(self._joined), 1)
                reply: Any = self._client.xreadgroup(
                    self._group, self._consumer, dict.fromkeys(self._joined, ">"), count=count, block=block
                )
                entries = [
                    (Place(stream.decode(), id.decode()), fields) for stream, part in reply for id, fields in part
                ]
            batch = self._decode(entries)
        except RedisError as error:
            self._failed(error)
            return []
        self._backoff.worked()
        return batch

    def _failed(self, error: RedisError) -> None:
        if isinstance(error, ResponseError) and "NOGROUP" in str(error):
            lost = next((stream for stream in self._joined if f"{stream}'" in str(error)), self._prefix)
            logger.warning("consumer group %s of %s is lost", self._group, lost)
        elif not self._backoff.failing:
            logger.warning("%s cannot be read from Redis; trying again: %s", self._prefix, error)
        # Redis may come back as an empty server. Joining again does no harm when the group still exists.
        self._joined, self._next_update = [], 0.0
        self._backoff.failed()

    def _update_streams(self) -> None:
        """Update the list of streams and join the new ones."""
        streams = self._streams()
        for stream in streams:
            if stream not in self._joined:
                self._join(stream)
        self._joined = streams
        self._next_update = time.monotonic() + _STREAMS_SECONDS

    def _join(self, stream: str) -> None:
        try:
            self._client.xgroup_create(stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        else:
            logger.info("consumer group %s of %s created from the oldest record", self._group, stream)
            self._in_flight = {place for place in self._in_flight if place.stream != stream}
            self._acks = [place for place in self._acks if place.stream != stream]
        entries: Any = self._client.xpending_range(
            stream, self._group, min="-", max="+", count=_MAX_PENDING, consumername=self._consumer
        )
        pending = [Place(stream, entry["message_id"].decode()) for entry in entries]
        known = self._in_flight.union(self._acks, self._claimed)
        self._claimed.extend(place for place in pending if place not in known)

    def _send_acks(self) -> None:
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for place in self._acks:
            by_stream[place.stream].append(place.id)
        for stream, ids in by_stream.items():
            self._client.xack(stream, self._group, *ids)
        self._acks.clear()

    def _claim_idle(self) -> None:
        """Claim the records of dead consumers; claiming own records in flight resets their idle time."""
        if time.monotonic() < self._next_claim:
            return
        known = self._in_flight.union(self._claimed)
        for stream in self._joined:
            ids: Any = self._client.xautoclaim(
                stream, self._group, self._consumer, self._min_idle_ms, start_id="0-0", count=_MAX_PENDING, justid=True
            )
            places = [Place(stream, id.decode()) for id in ids]
            self._claimed.extend(place for place in places if place not in known)
        self._next_claim = time.monotonic() + self._min_idle_ms / 2000

    def _fetch_claimed(self, max_records: int) -> list[tuple[Place, dict[bytes, bytes]]]:
        if not self._claimed:
            return []
        places = [self._claimed[i] for i in range(min(max_records, len(self._claimed)))]
        with self._client.pipeline(transaction=False) as pipe:
            for place in places:
                pipe.xrange(place.stream, min=place.id, max=place.id)
            replies = pipe.execute()
        entries = [(place, reply[0][1]) for place, reply in zip(places, replies, strict=True) if reply]
        # A trimmed entry leaves the stream but stays pending.
        trimmed = [place for place, reply in zip(places, replies, strict=True) if not reply]
        for place in trimmed:
            self._client.xack(place.stream, self._group, place.id)
        for _ in places:
            self._claimed.popleft()
        return entries

    def _copy_refused(self, place: Place, reason: str) -> None:
        refused = refused_key(self._prefix)
        keys, limits = [place.stream, refused, counter_key(refused)], [MAX_REFUSED, _MAX_REFUSED_BYTES]
        try:
            self._keep_refused(keys=keys, args=[place.id, reason, *limits])
        except RedisError as error:
            logger.warning("record %s of %s is not kept for inspection: %s", place.id, place.stream, error)

    def _decode(self, entries: list[tuple[Place, dict[bytes, bytes]]]) -> list[DeliveredRecord[Kind]]:
        batch: list[DeliveredRecord[Kind]] = []
        invalid: list[Place] = []
        for place, fields in entries:
            data = fields.get(FIELD, b"")
            try:
                batch.append(DeliveredRecord(place, self.decode(data)))
            except RecordFormatError as error:
                logger.warning("record %s of %s is skipped: %s", place.id, place.stream, error)
                invalid.append(place)
            except Exception as error:
                # Neither the bytes nor the error are logged, because both may quote a user.
                logger.warning("record %s of %s (%d bytes) cannot be read, skipped", place.id, place.stream, len(data))
                invalid.append(place)
                self._copy_refused(place, type(error).__name__)
        self._in_flight.update(delivered.place for delivered in batch)
        self._acks += invalid  # sent with the next call, because an error here would lose the batch
        return batch


class TraceReader(StreamReader[Trace]):
    """Reader of traces."""

    decode = staticmethod(trace.decode)


class ExchangeReader(StreamReader[Exchange]):
    """Reader of exchanges."""

    decode = staticmethod(exchange.decode)
