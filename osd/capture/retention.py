"""Retention of the records on a service's streams, by age, number and size, and removal of single requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
import redis
from redis.exceptions import ResponseError

from osd.capture.streams import counter_key, domains_in, group_of, index_key, refused_key, stream_of
from osd.capture.trace import FIELD
from osd.config import CaptureSettings

_Name = TypeVar("_Name")

_DAY = 86_400.0
_BATCH = 8  # entries per read: a trace with hidden states takes about a megabyte
_MAX_EXPIRED = 64  # entries per call of the script, during which other clients wait

# The id of an entry holds its time of creation, so no record leaves Redis.
_EXPIRE = """
local gone = 0
while gone < tonumber(ARGV[2]) do
  local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  if not first or tonumber(string.match(first[1], '%d+$')) >= tonumber(ARGV[1]) then break end
  redis.call('XDEL', KEYS[1], first[1])
  gone = gone + 1
end
return gone
"""

# One script, so that a concurrent writer or the domain's trainer cannot lose its stream.
_DROP_UNUSED = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if group[2] == ARGV[2] then return 0 end
  end
end
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1], KEYS[2])
"""


class Head(msgspec.Struct, frozen=True):
    """Id of the request in a record; the other fields are skipped."""

    request_id: str


_head_decoder = msgspec.msgpack.Decoder(Head)


def oldest_allowed(settings: CaptureSettings, now: float) -> float | None:
    """Return the earliest allowed time of creation, in seconds since the epoch; None without a limit of age."""
    return None if settings.keep_days is None else now - settings.keep_days * _DAY


def belongs(request_id: str, purged_id: str) -> bool:
    """Return whether a record belongs to a purged request.

    Args:
        request_id: the id in the record.
        purged_id: the id of the request, or of the response that the request is a choice of.
    """
    return purged_id in (request_id, request_id.rpartition("-")[0])


def fair_shares(sizes: Mapping[_Name, int], limit: int) -> dict[_Name, int]:
    """Return the size to keep of each item so that the sum is at most ``limit`` (max-min fairness).

    The largest items shrink first, and no item shrinks below an equal part of the limit. The remainder of the division
    goes to the first items.
    """
    left, shares = limit, dict(sizes)
    if sum(sizes.values()) > limit:
        ordered = sorted(
            ((size, -index, name) for index, (name, size) in enumerate(sizes.items())), key=itemgetter(0, 1)
        )
        for done, (size, _, name) in enumerate(ordered):
            shares[name] = min(size, left // (len(sizes) - done))
            left -= shares[name]
    return shares


class Retention:
    """Deletion of records from all streams under ``settings.stream``.

    Above ``settings.max_records`` records or ``settings.keep_mb`` megabytes the largest streams lose their oldest
    records. So the traffic of one domain cannot push out the records of another below an equal part. All domains that
    no trainer trains share one part, because clients can name any number of domains.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """

    def __init__(self, client: redis.Redis, settings: CaptureSettings) -> None:
        self._client, self._settings = client, settings
        self._expire_some = client.register_script(_EXPIRE)
        self._drop_unused = client.register_script(_DROP_UNUSED)

    def enforce(self, now: float) -> int:
        """Delete records above the limits, and unused streams; return the number of deleted records.

        Args:
            now: the time for the limit of age, in seconds since the epoch.
        """
        deleted = self._expire(now) + self.shrink()
        self._drop_unused_streams()
        return deleted

    def shrink(self) -> int:
        """Delete the oldest records of the largest streams down to the limits; return the number of deleted records."""
        megabytes = self._settings.keep_mb
        lengths = self._lengths()
        deleted = self._trim(lengths, lengths, self._settings.max_records)
        while megabytes is not None:
            lengths = self._lengths()
            # The calculation assumes records of equal size within a part; the next pass corrects the error.
            trimmed = self._trim(lengths, self._sizes(lengths), megabytes << 20)
            if not trimmed:
                break
            deleted += trimmed
        return deleted

    def give_up(self, share: float) -> int:
        """Delete a ``share`` (0 to 1) of all records; return the number of deleted records."""
        lengths = self._lengths()
        return self._trim(lengths, lengths, int(sum(lengths.values()) * (1 - share)))

    def purge(self, request_id: str) -> int:
        """Delete the records of a request or response; return the number of deleted records."""
        deleted = 0
        for stream in self._streams():
            ids = [id for id, head in self._heads(stream) if head and belongs(head.request_id, request_id)]
            deleted += int(self._client.xdel(stream, *ids)) if ids else 0
        refused = refused_key(self._settings.stream)
        heads = list(self._heads(refused))
        if unknown := [id for id, head in heads if head is None]:  # these may belong to the purged request
            self._client.xdel(refused, *unknown)
        ids = [id for id, head in heads if head and belongs(head.request_id, request_id)]
        return deleted + (int(self._client.xdel(refused, *ids)) if ids else 0)

    def _streams(self) -> list[str]:
        """Return all streams, most recently written first."""
        prefix = self._settings.stream
        return [stream_of(prefix, domain) for domain in domains_in(self._client, prefix)]

    def _lengths(self) -> dict[str, int]:
        streams = self._streams()
        with self._client.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.xlen(stream)
            return dict(zip(streams, pipe.execute(), strict=True))

    def _sizes(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of the non-empty streams; streams that were deleted in between are left out."""
        streams = [stream for stream, length in lengths.items() if length]
        with self._client.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.memory_usage(stream, samples=0)
            return {stream: size for stream, size in zip(streams, pipe.execute(), strict=True) if size}

    def _trim(self, lengths: Mapping[str, int], sizes: Mapping[str, int], limit: int) -> int:
        """Delete the oldest records of the largest parts until all ``sizes`` are about ``limit``; return their number.

        A trained domain is a part, and all untrained domains together are one part.
        """
        if sum(sizes.values()) <= limit:
            return 0
        trained = self._trained(sizes)
        untrained = [stream for stream in sizes if stream not in trained]
        parts = [*([stream] for stream in trained), untrained]
        part_sizes = {index: sum(sizes[stream] for stream in part) for index, part in enumerate(parts)}
        shares, kept = fair_shares(part_sizes, limit), dict[str, int]()
        for index, part in enumerate(parts):
            records = {stream: lengths[stream] for stream in part}
            count = sum(records.values()) * shares[index] // max(part_sizes[index], 1)
            kept |= fair_shares(records, count)
        return self._keep(lengths, kept)

    def _trained(self, streams: Iterable[str]) -> list[str]:
        """Return the streams that the trainer of their own domain reads."""
        names = list(streams)
        with self._client.pipeline(transaction=False) as pipe:
            for stream in names:
                pipe.xinfo_groups(stream)
            replies: Any = pipe.execute(raise_on_error=False)
        trained: list[str] = []
        for stream, groups in zip(names, replies, strict=True):
            if isinstance(groups, ResponseError):  # the stream was deleted in between
                continue
            if isinstance(groups, Exception):
                raise groups
            trainer_group = group_of(stream.rpartition(":")[2]).encode()
            if any(group["name"] == trainer_group for group in groups):
                trained.append(stream)
        return trained

    def _keep(self, lengths: Mapping[str, int], kept: Mapping[str, int]) -> int:
        with self._client.pipeline(transaction=False) as pipe:
            for stream, count in kept.items():
                if count < lengths[stream]:
                    pipe.xtrim(stream, maxlen=count, approximate=False)
            return sum(pipe.execute())

    def _expire(self, now: float) -> int:
        oldest, deleted = oldest_allowed(self._settings, now), 0
        if oldest is None:
            return 0
        for stream in [*self._streams(), refused_key(self._settings.stream)]:
            batch = _MAX_EXPIRED
            while batch == _MAX_EXPIRED:
                batch = int(self._expire_some(keys=[stream], args=[int(1000 * oldest), _MAX_EXPIRED]))
                deleted += batch
        return deleted

    def _drop_unused_streams(self) -> None:
        """Delete empty streams that no trainer of their domain reads."""
        prefix = self._settings.stream
        for domain in domains_in(self._client, prefix):
            stream = stream_of(prefix, domain)
            self._drop_unused(keys=[stream, counter_key(stream), index_key(prefix)], args=[domain, group_of(domain)])

    def _heads(self, stream: str) -> Iterator[tuple[bytes, Head | None]]:
        """Yield the id of each entry and the head of its record; None if the head cannot be read."""
        start = "-"
        while True:
            entries: Any = self._client.xrange(stream, min=start, count=_BATCH)
            for id, fields in entries:
                try:
                    head = _head_decoder.decode(fields.get(FIELD, b""))
                except (msgspec.MsgspecError, RecursionError):
                    head = None
                yield id, head
            if len(entries) < _BATCH:
                return
            start = "(" + entries[-1][0].decode()
