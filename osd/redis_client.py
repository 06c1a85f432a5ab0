"""Redis: connections that fail soon instead of hanging, with a prefix before every key, and reports that expire."""

from __future__ import annotations

import time
from typing import Any, Generic, Self, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, PythonRespSerializer
from redis.exceptions import DataError, ReadOnlyError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.utils import str_if_bytes

from osd.addresses import CA, PREFIX, SENTINEL

_Kind = TypeVar("_Kind")

MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0
"""Seconds without a try after a failure; doubled up to the longest."""

_SENTINEL_PORT = 26379


def connect(url: str, timeout: float = 0.5) -> redis.Redis:
    """Make a client that answers or raises within ``timeout`` seconds for each of connecting, sending, receiving.

    ``url`` is as redis-py has it, or names sentinels, as in ``redis+sentinel://host:port,host:port/service/db``;
    ``prefix`` in its query is put before every key. Callers decide whether and when to try again: the client repeats
    a command only when a server that has become a replica refused it, and asks anew who the master is.

    Raises:
        ValueError: it is not such a URL. The message may quote a part of it.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    prefix = query.pop(PREFIX, "")
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,  # it gives the same reply types with every server version from 6.2 on
        "retry": Retry(NoBackoff(), 1, (ReadOnlyError,)),
    }
    packer = PrefixPacker(prefix) if prefix else None
    if packer is not None:
        options["command_packer"] = packer
    if parts.scheme in SENTINEL:
        client = _of_sentinels(parts, query, options, timeout)
    else:
        client = _Client.from_url(parts._replace(query=urlencode(query)).geturl(), **options)
    if packer is not None:
        found = client.response_callbacks["SCAN"]

        def stripped(response: Any, **given: Any) -> Any:
            cursor, keys = found(response, **given)
            return cursor, [packer.stripped(key) for key in keys]

        client.set_response_callback("SCAN", stripped)
    return client


class _Client(redis.Redis):
    """Tells a refusal by a replica from other errors also where a script ran into it; closes what asked sentinels."""

    guards: Sentinel | None = None

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        try:
            return super().parse_response(connection, command_name, **options)
        except ResponseError as error:
            if "READONLY" in str(error):
                raise ReadOnlyError(str(error)) from None
            raise

    def close(self) -> None:
        super().close()
        if self.guards is not None:
            self.guards.close()


class _ToMaster(SentinelManagedConnection):
    """A connection to whom sentinels call master; a refusal by one that no longer is it is left to the client."""

    def read_response(self, *given: Any, **options: Any) -> Any:
        return Connection.read_response(self, *given, **options)


class _ToMasterOverTls(_ToMaster, SentinelManagedSSLConnection):
    """The same with TLS."""


def _of_sentinels(parts: SplitResult, query: dict[str, str], options: dict[str, Any], timeout: float) -> _Client:
    service, _, db = parts.path.strip("/").partition("/")
    user, _, places = parts.netloc.rpartition("@")
    if not service or not all(places.split(",")):
        raise ValueError("sentinels need host:port,host:port/service")
    name, _, password = map(unquote, user.partition(":"))
    tls: dict[str, Any] = {"ssl_ca_certs": query.pop(CA, None)} if parts.scheme == SENTINEL[1] else {}
    own = {key: query.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in query}
    if query:
        raise ValueError(f"{next(iter(query))} is not known with sentinels")
    waits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    secured = {"ssl": True, **tls} if tls else {}
    sentinel = Sentinel([_place(place) for place in places.split(",")], sentinel_kwargs={**waits, **own, **secured})
    pool = SentinelConnectionPool(
        service,
        sentinel,
        connection_class=_ToMasterOverTls if tls else _ToMaster,
        db=int(db or 0),
        username=name or None,
        password=password or None,
        **options,
        **tls,
    )
    client = cast(_Client, _Client.from_pool(pool))
    client.guards = sentinel
    return client


def _place(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and not port.endswith("]") else (text.strip("[]"), _SENTINEL_PORT)


def decoded(data: bytes | str, kind: type[_Kind], what: str) -> _Kind:
    """The JSON that Redis holds, as a ``kind``.

    Raises:
        DataError: it is none; names ``what`` was read.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{what}: {error}") from None


class RedisClient:
    """Something kept in Redis, read and written over connections of its own; leaving it as a context closes them."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Backoff:
    """When to try again after failures."""

    def __init__(self) -> None:
        self._delay = MIN_BACKOFF
        self._until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the next try, 0 when it may be now."""
        return max(0.0, self._until - time.monotonic())

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._until > 0

    def failed(self) -> None:
        """Wait, twice as long as the last time."""
        self._until = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MAX_BACKOFF)

    def worked(self) -> None:
        """Back to normal."""
        self._delay, self._until = MIN_BACKOFF, 0.0


_CUTOFF = 6000  # as redis-py's own: larger arguments are not copied together

_KEYLESS = {
    *("AUTH", "CLIENT", "CONFIG", "DBSIZE", "DISCARD", "EXEC", "FLUSHALL", "FLUSHDB", "HELLO", "INFO", "MULTI", "PING"),
    *("QUIT", "ROLE", "SCRIPT", "SELECT", "TIME", "UNWATCH", "WAIT"),
}
_ALL_KEYS = {
    *("DEL", "EXISTS", "MGET", "PSUBSCRIBE", "PUNSUBSCRIBE", "SUBSCRIBE", "TOUCH", "UNLINK", "UNSUBSCRIBE", "WATCH")
}
_SCRIPTS, _STREAMS = {"EVAL", "EVALSHA", "FCALL"}, {"XREAD", "XREADGROUP"}


class PrefixPacker:
    """Packs commands as redis-py does, keys and channels with a prefix: of most commands the first argument is one."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._plain = PythonRespSerializer(_CUTOFF, _encoded)

    def pack(self, *command: Any) -> list[Any]:
        """The pieces to send; ``command`` begins with its name, as ``client.execute_command`` takes it."""
        name, *arguments = command
        for index in _keys(str_if_bytes(name).split()[0].upper(), arguments):
            arguments[index] = self._prefix + _encoded(arguments[index])
        return self._plain.pack(name, *arguments)

    def stripped(self, key: bytes) -> bytes:
        """A key that Redis found, as it was written."""
        return key.removeprefix(self._prefix)


def _keys(name: str, arguments: list[Any]) -> range:
    """Which arguments of a command are keys, channels or patterns of them."""
    if name in _KEYLESS:
        return range(0)
    if name in _ALL_KEYS:
        return range(len(arguments))
    if name in _SCRIPTS:
        return range(2, 2 + int(arguments[1]))
    if name in _STREAMS:
        first = [str_if_bytes(argument) for argument in arguments].index("STREAMS") + 1
        return range(first, (first + len(arguments)) // 2)
    if name == "SCAN":
        words = [str_if_bytes(argument) for argument in arguments]
        pattern = words.index("MATCH") + 1  # without a pattern it would find the keys of others
        return range(pattern, pattern + 1)
    return range(min(1, len(arguments)))


def _encoded(argument: Any) -> Any:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


# Reports carry the server's time: the clocks of who tells and of who reads may differ.
_TELL = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now[1] * 1000 + now[2] / 1000) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('EXISTS', KEYS[2])
"""

# It writes too: a Redis that takes no reports, because it is full or a replica, must not look like one without any.
_READ = """
local now = redis.call('TIME')
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
end
local oldest = now[1] * 1000 + now[2] / 1000 - ARGV[1]
local fields = redis.call('HGETALL', KEYS[1])
local fresh = {}
for i = 1, #fields, 2 do
  local space = string.find(fields[i + 1], ' ', 1, true)
  if tonumber(string.sub(fields[i + 1], 1, space - 1)) < oldest then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    fresh[#fresh + 1] = fields[i]
    fresh[#fresh + 1] = string.sub(fields[i + 1], space + 1)
  end
end
return fresh
"""


class LiveReports(Generic[_Kind]):
    """Reports of one ``kind`` under one key, by the names of who tells; ``tell`` and ``read`` are a round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, client: redis.Redis, key: str, kind: type[_Kind] | Any, what: str) -> None:
        """Errors name ``what`` the reports are."""
        self._client, self._key, self._kind, self._what = client, key, kind, what
        self._keys = [key, f"{key}:read"]
        self._tell, self._read = client.register_script(_TELL), client.register_script(_READ)

    def tell(self, name: str, said: _Kind, expiry_ms: int, pipeline: redis.Redis | None = None) -> Any:
        """Say it in the place of what ``name`` said before; all of them go when nobody tells for ``expiry_ms``.

        Says whether somebody looks at the reports, which a ``pipeline`` answers when it is executed.
        """
        return self._tell(self._keys, [name, msgspec.json.encode(said), expiry_ms], pipeline)

    def read(self, expiry_ms: int, attention_ms: int) -> dict[str, _Kind]:
        """What was said within the last ``expiry_ms``; somebody looks for ``attention_ms`` from now on.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        fields: list[bytes] = self._read(self._keys, [expiry_ms, attention_ms])
        return {
            name.decode(errors="replace"): decoded(data, self._kind, self._what)
            for name, data in zip(fields[::2], fields[1::2], strict=True)
        }

    def withdraw(self, name: str) -> None:
        """Take back what was said: who said it ends."""
        self._client.hdel(self._key, name)
