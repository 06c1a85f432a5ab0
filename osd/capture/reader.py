"""Records from the streams of one or several domains, for the one who learns from them."""

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
from osd.capture.streams import NONE, Waiting, domains_in, stream_of, waiting
from osd.capture.trace import FIELD, FormatError, Trace
from osd.config import CaptureSettings, tenant_of
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

_READ_TIMEOUT = 5.0  # seconds
_LONGEST_WAIT_MS = 2000
_LOOK_SECONDS = 2.0
_MANY = 10_000


class Place(NamedTuple):
    """Where a record is: on which stream, and under which id."""

    stream: str
    id: str


@dataclass(frozen=True)
class Delivered(Generic[Kind]):
    """A record with the place to acknowledge it by."""

    place: Place
    record: Kind


class StreamReader(Generic[Kind]):
    """Reads a domain's records as one consumer of a group, at least once each, for one thread.

    A record that was delivered and not acknowledged comes again: to the same ``consumer`` name first after a restart,
    else to whoever finds it idle for ``min_idle_ms``. With Redis gone ``read`` gives nothing and goes on when it is
    back; a lost group is made again from the oldest record kept.
    """

    decode: Callable[[bytes], Kind]
    """Makes a record of bytes; raises ValueError where they are none."""

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
        """Read the domain's records, with ``tenant`` those of all domains of the same tenant."""
        self._prefix, self._domain = settings.stream, domain
        self._group, self._consumer = group, consumer
        self._min_idle_ms, self._tenant = min_idle_ms, tenant
        # Batches are large: traces with hidden states take about a megabyte each.
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._retention = Retention(self._client, settings)
        self._backoff = Backoff()
        self._joined: list[str] = []  # the streams that the group reads
        self._look_at = 0.0
        self._claimed: deque[Place] = deque()  # pending with us, but not yet given to the caller
        self._in_flight: set[Place] = set()  # given to the caller, not yet acknowledged
        self._acks: list[Place] = []  # acknowledged by the caller, not yet known to Redis
        self._next_claim = 0.0
        self._waiting = NONE
        self._counts = {"read": 0, "reclaimed": 0, "undecodable": 0, "trimmed": 0}

    def read(self, max_records: int, block_ms: int) -> list[Delivered[Kind]]:
        """Take up to ``max_records`` records, waiting at most ``block_ms`` milliseconds for the first.

        Where there are more streams than that, it is one of each. Returns early with what is there; an empty list when
        nothing came or Redis is gone.
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
        """Acknowledge records; while Redis is gone this is kept and sent later."""
        known = [place for place in places if place in self._in_flight]
        self._in_flight.difference_update(known)
        self._acks += known
        if not self._backoff.remaining:
            try:
                self._send_acks()
            except RedisError as error:
                self._failed(error)

    def sweep(self) -> None:
        """Take off the streams what the settings no longer allow; while Redis is gone this waits."""
        if self._backoff.remaining:
            return
        try:
            self._retention.enforce(time.time())
        except RedisError as error:
            self._failed(error)

    def waiting(self) -> Waiting:
        """What is not acknowledged: never delivered (and not trimmed away), or pending.

        While Redis is gone it is what was seen last.
        """
        if not self._backoff.remaining:
            try:
                self._waiting = waiting(self._client, self._joined or self._streams(), self._group)
            except RedisError as error:
                self._failed(error)
        return self._waiting

    def counters(self) -> dict[str, int]:
        """Records ``read``, of them ``reclaimed``; ``undecodable`` ones; ``trimmed`` before they were acknowledged."""
        return dict(self._counts)

    def close(self) -> None:
        """Send what is acknowledged and close the connections."""
        with contextlib.suppress(RedisError):
            self._send_acks()
        self._client.close()

    def _streams(self) -> list[str]:
        domains = [self._domain]
        if self._tenant:
            tenant = tenant_of(self._domain)
            others = domains_in(self._client, self._prefix)
            domains += [other for other in others if tenant_of(other) == tenant and other != self._domain]
        return [stream_of(self._prefix, domain) for domain in domains]

    def _try_read(self, max_records: int, deadline: float) -> list[Delivered[Kind]]:
        try:
            if time.monotonic() >= self._look_at:
                self._look()
            self._send_acks()
            self._claim_idle()
            entries = self._fetch_claimed(max_records)
            if not entries:
                # Redis takes 0 as for ever; a wait longer than the socket's would look like a dead server.
                wait = min(int(1000 * (deadline - time.monotonic())), _LONGEST_WAIT_MS)
                block = wait if wait > 0 else None
                # As the count is that of each stream.
                count = max(max_records // len(self._joined), 1)
                reply: Any = self._client.xreadgroup(
                    self._group, self._consumer, dict.fromkeys(self._joined, ">"), count=count, block=block
                )
                entries = [
                    (Place(stream.decode(), id.decode()), fields) for stream, some in reply for id, fields in some
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
            logger.warning("%s cannot be read from Redis, trying again: %s", self._prefix, error)
        # Redis may come back as another, empty server: join again, which changes nothing where the group is there.
        self._joined, self._look_at = [], 0.0
        self._backoff.failed()

    def _look(self) -> None:
        """Read the streams that there are now."""
        streams = self._streams()
        for stream in streams:
            if stream not in self._joined:
                self._join(stream)
        self._joined = streams
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def _join(self, stream: str) -> None:
        try:
            self._client.xgroup_create(stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        else:
            logger.info("consumer group %s of %s made, from the oldest record kept", self._group, stream)
            self._in_flight = {place for place in self._in_flight if place.stream != stream}
            self._acks = [place for place in self._acks if place.stream != stream]
        mine: Any = self._client.xpending_range(
            stream, self._group, min="-", max="+", count=_MANY, consumername=self._consumer
        )
        pending = [Place(stream, entry["message_id"].decode()) for entry in mine]
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
        """Take what dead consumers hold; taking our own records in flight marks them as alive."""
        if time.monotonic() < self._next_claim:
            return
        known = self._in_flight.union(self._claimed)
        for stream in self._joined:
            ids: Any = self._client.xautoclaim(
                stream, self._group, self._consumer, self._min_idle_ms, start_id="0-0", count=_MANY, justid=True
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
        found = [(place, reply[0][1]) for place, reply in zip(places, replies, strict=True) if reply]
        # Trimming takes an entry off the stream but leaves it pending.
        trimmed = [place for place, reply in zip(places, replies, strict=True) if not reply]
        for place in trimmed:
            self._client.xack(place.stream, self._group, place.id)
        self._counts["trimmed"] += len(trimmed)
        for _ in places:
            self._claimed.popleft()
        self._counts["reclaimed"] += len(found)
        return found

    def _decode(self, entries: list[tuple[Place, dict[bytes, bytes]]]) -> list[Delivered[Kind]]:
        batch: list[Delivered[Kind]] = []
        bad: list[Place] = []
        for place, fields in entries:
            data = fields.get(FIELD, b"")
            try:
                batch.append(Delivered(place, self.decode(data)))
            except FormatError as error:
                logger.warning("record %s of %s is skipped: %s", place.id, place.stream, error)
                bad.append(place)
            except ValueError:
                # Neither the bytes nor the error are logged: both may quote a user.
                logger.warning("record %s of %s (%d bytes) cannot be read, skipped", place.id, place.stream, len(data))
                bad.append(place)
        self._in_flight.update(delivered.place for delivered in batch)
        self._counts["read"] += len(batch)
        self._counts["undecodable"] += len(bad)
        self._acks += bad  # sent with the next call: a failure here must not lose the batch
        return batch


class TraceReader(StreamReader[Trace]):
    """Reads traces."""

    decode = staticmethod(trace.decode)


class ExchangeReader(StreamReader[Exchange]):
    """Reads exchanges."""

    decode = staticmethod(exchange.decode)
