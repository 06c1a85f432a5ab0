"""How many records are kept on the streams of a service and how long, and how they are taken off before that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
import redis

from osd.capture.streams import counter_key, domains_in, index_key, stream_of
from osd.capture.trace import FIELD
from osd.config import CaptureSettings

_Name = TypeVar("_Name")

_DAY = 86_400.0
_BATCH = 8  # entries in one answer of Redis: traces with hidden states take about a megabyte each
_EXPIRED = 64  # entries that one call deletes at most: others wait for Redis meanwhile

# What a record is made of stays in Redis: its id says when it was made.
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

# Whoever writes or reads a stream meanwhile must not find it gone with what he has put there.
_DROP_UNUSED = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('XLEN', KEYS[1]) > 0 or #redis.call('XINFO', 'GROUPS', KEYS[1]) > 0 then return 0 end
end
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1], KEYS[2])
"""


class Head(msgspec.Struct, frozen=True):
    """The part of a record that a purge needs; the rest is skipped."""

    request_id: str


_head = msgspec.msgpack.Decoder(Head)


def oldest_allowed(settings: CaptureSettings, now: float) -> float | None:
    """The time before which no record may have been made, in seconds since the epoch; None for any age."""
    return None if settings.keep_days is None else now - settings.keep_days * _DAY


def belongs(request_id: str, asked: str) -> bool:
    """Whether a record is of the request ``asked``: by its own id, or by the id of the response it is a choice of."""
    return asked in (request_id, request_id.rpartition("-")[0])


def fair_shares(sizes: Mapping[_Name, int], most: int) -> dict[_Name, int]:
    """How much of each is kept so that all together take ``most`` at most: the largest give first (max-min fairness).

    Nobody gives below an equal part of ``most``. What cannot be divided goes to those that stand first.
    """
    left, shares = most, dict(sizes)
    if sum(sizes.values()) > most:
        ordered = sorted(
            ((size, -place, name) for place, (name, size) in enumerate(sizes.items())), key=itemgetter(0, 1)
        )
        for done, (size, _, name) in enumerate(ordered):
            shares[name] = min(size, left // (len(sizes) - done))
            left -= shares[name]
    return shares


class Retention:
    """Deletes records from all streams under ``settings.stream``: those too old, too many, and of one request.

    Where there are more than ``settings.max_records``, or they take more than ``settings.keep_mb``, the largest streams
    give their oldest, so that no domain's traffic pushes out what others have up to an equal part.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """

    def __init__(self, client: redis.Redis, settings: CaptureSettings) -> None:
        self._client, self._settings = client, settings
        self._expire_some = client.register_script(_EXPIRE)
        self._drop_unused = client.register_script(_DROP_UNUSED)

    def enforce(self, now: float) -> int:
        """Delete what the settings no longer allow, and streams that nobody needs; returns how many records."""
        gone = self._expire(now) + self.shrink()
        self._tidy()
        return gone

    def shrink(self) -> int:
        """Delete the oldest records of the largest streams until all are within their bounds; returns how many."""
        largest = self._settings.keep_mb
        gone = self._trim(self._lengths(), self._settings.max_records)
        while largest is not None:
            lengths = self._lengths()
            sizes = self._sizes(lengths)
            if sum(sizes.values()) <= largest << 20:
                break
            # All records of a stream are taken for equally large; one at least goes, and the next look corrects.
            shares = fair_shares(sizes, largest << 20)
            trimmed = self._keep(lengths, {key: lengths[key] * shares[key] // sizes[key] for key in sizes})
            if not trimmed:
                break
            gone += trimmed
        return gone

    def give_up(self, share: float) -> int:
        """Delete so much of all records; returns how many."""
        lengths = self._lengths()
        return self._trim(lengths, int(sum(lengths.values()) * (1 - share)))

    def purge(self, asked: str) -> int:
        """Delete the records of a request; returns how many there were."""
        gone = 0
        for stream in self._streams():
            ids = [id for id, head in self._heads(stream) if belongs(head.request_id, asked)]
            gone += int(self._client.xdel(stream, *ids)) if ids else 0
        return gone

    def _streams(self) -> list[str]:
        """All streams, the one written to last first."""
        prefix = self._settings.stream
        return [stream_of(prefix, domain) for domain in domains_in(self._client, prefix)]

    def _lengths(self) -> dict[str, int]:
        streams = self._streams()
        with self._client.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.xlen(stream)
            return dict(zip(streams, pipe.execute(), strict=True))

    def _sizes(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of the streams that hold something and were not deleted meanwhile."""
        streams = [stream for stream, length in lengths.items() if length]
        with self._client.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.memory_usage(stream, samples=0)
            return {stream: size for stream, size in zip(streams, pipe.execute(), strict=True) if size}

    def _trim(self, lengths: Mapping[str, int], most: int) -> int:
        return self._keep(lengths, fair_shares(lengths, most))

    def _keep(self, lengths: Mapping[str, int], kept: Mapping[str, int]) -> int:
        with self._client.pipeline(transaction=False) as pipe:
            for stream, count in kept.items():
                if count < lengths[stream]:
                    pipe.xtrim(stream, maxlen=count, approximate=False)
            return sum(pipe.execute())

    def _expire(self, now: float) -> int:
        oldest, gone = oldest_allowed(self._settings, now), 0
        if oldest is None:
            return 0
        for stream in self._streams():
            deleted = _EXPIRED
            while deleted == _EXPIRED:
                deleted = int(self._expire_some(keys=[stream], args=[int(1000 * oldest), _EXPIRED]))
                gone += deleted
        return gone

    def _tidy(self) -> None:
        """Delete streams that are empty and that nobody reads."""
        prefix = self._settings.stream
        for domain in domains_in(self._client, prefix):
            stream = stream_of(prefix, domain)
            self._drop_unused(keys=[stream, counter_key(stream), index_key(prefix)], args=[domain])

    def _heads(self, stream: str) -> Iterator[tuple[bytes, Head]]:
        start = "-"
        while True:
            entries: Any = self._client.xrange(stream, min=start, count=_BATCH)
            for id, fields in entries:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield id, _head.decode(fields.get(FIELD, b""))
            if len(entries) < _BATCH:
                return
            start = "(" + entries[-1][0].decode()
