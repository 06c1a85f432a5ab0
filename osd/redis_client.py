"""Redis connections with short timeouts and a key prefix, and reports that expire."""

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
"""Minimum and maximum pause after a failure, in seconds; each failure doubles the pause."""

URL_FORMS = "redis://[:password@]host:port/db, rediss:// or redis+sentinel://host:port,host:port/service/db"
"""Forms of the URL of a Redis, for error messages."""

_SENTINEL_PORT = 26379


def connect(url: str, timeout: float = 0.5) -> redis.Redis:
    """Create a Redis client.

    The client does not retry, with one exception: it repeats a command that a former master refused as a replica, after
    it has asked the sentinels for the new master.

    Args:
        url: a URL of redis-py, or one with sentinels, ``redis+sentinel://host:port,host:port/service/db``. The field
            ``prefix`` of its query is prepended to every key.
        timeout: maximum time of each of connecting, sending and receiving, in seconds.

    Raises:
        ValueError: the URL is invalid. The message may quote a part of it.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    prefix = query.pop(PREFIX, "")
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,  # the reply types are the same for all server versions from 6.2
        "retry": Retry(NoBackoff(), 1, (ReadOnlyError,)),
    }
    packer = PrefixPacker(prefix) if prefix else None
    if packer is not None:
        options["command_packer"] = packer
    if parts.scheme in SENTINEL:
        client = _connect_by_sentinels(parts, query, options, timeout)
    else:
        client = _FailoverClient.from_url(parts._replace(query=urlencode(query)).geturl(), **options)
    if packer is not None:
        parse_scan = client.response_callbacks["SCAN"]

        def strip_keys(response: Any, **options: Any) -> Any:
            cursor, keys = parse_scan(response, **options)
            return cursor, [packer.strip(key) for key in keys]

        client.set_response_callback("SCAN", strip_keys)
    return client


class _FailoverClient(redis.Redis):
    """Client that also recognises the refusal by a replica inside a script, and closes its connections to sentinels."""

    sentinels: Sentinel | None = None

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        try:
            return super().parse_response(connection, command_name, **options)
        except ResponseError as error:
            if "READONLY" in str(error):
                raise ReadOnlyError(str(error)) from None
            raise

    def close(self) -> None:
        super().close()
        if self.sentinels is not None:
            self.sentinels.close()


class _MasterConnection(SentinelManagedConnection):
    """Connection to the master that the sentinels name; the client handles the refusal by a former master."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        return Connection.read_response(self, *arguments, **options)


class _MasterTlsConnection(_MasterConnection, SentinelManagedSSLConnection):
    """TLS connection to the master that the sentinels name."""


def _connect_by_sentinels(
    parts: SplitResult, query: dict[str, str], options: dict[str, Any], timeout: float
) -> _FailoverClient:
    service, _, db = parts.path.strip("/").partition("/")
    user, _, addresses = parts.netloc.rpartition("@")
    if not service or not all(addresses.split(",")):
        raise ValueError("sentinels need host:port,host:port/service")
    name, _, password = map(unquote, user.partition(":"))
    tls: dict[str, Any] = {"ssl_ca_certs": query.pop(CA, None)} if parts.scheme == SENTINEL[1] else {}
    login = {key: query.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in query}
    if query:
        raise ValueError(f"the field {next(iter(query))} of the query is not supported with sentinels")
    timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    encryption = {"ssl": True, **tls} if tls else {}
    sentinel = Sentinel(
        [_parse_address(address) for address in addresses.split(",")],
        sentinel_kwargs={**timeouts, **login, **encryption},
    )
    pool = SentinelConnectionPool(
        service,
        sentinel,
        connection_class=_MasterTlsConnection if tls else _MasterConnection,
        db=int(db or 0),
        username=name or None,
        password=password or None,
        **options,
        **tls,
    )
    client = cast(_FailoverClient, _FailoverClient.from_pool(pool))
    client.sentinels = sentinel
    return client


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and not port.endswith("]") else (text.strip("[]"), _SENTINEL_PORT)


def decoded(data: bytes | str, kind: type[_Kind], content: str) -> _Kind:
    """Return the value of type ``kind`` in a JSON text of Redis.

    Raises:
        DataError: the text is not valid JSON of that type; the message begins with ``content``.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{content}: {error}") from None


class RedisClient:
    """Base class of Redis-backed objects with their own connections; as a context manager it closes them."""

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
    """Clock of pauses between attempts after failures, with exponential growth; no method waits."""

    def __init__(self) -> None:
        self._delay = MIN_BACKOFF
        self._until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the next attempt, 0 when an attempt is due."""
        return max(0.0, self._until - time.monotonic())

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._until > 0

    def failed(self) -> None:
        """Note a failure: the next attempt is due after a pause twice as long as the previous one, up to a maximum."""
        self._until = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MAX_BACKOFF)

    def worked(self) -> None:
        """Reset the pause after a success."""
        self._delay, self._until = MIN_BACKOFF, 0.0


_CUTOFF = 6000  # as in redis-py: larger arguments are sent without a copy

_KEYLESS = {
    *("AUTH", "CLIENT", "CONFIG", "DBSIZE", "DISCARD", "EXEC", "FLUSHALL", "FLUSHDB", "HELLO", "INFO", "MULTI", "PING"),
    *("QUIT", "ROLE", "SCRIPT", "SELECT", "TIME", "UNWATCH", "WAIT"),
}
_ALL_KEYS = {
    *("DEL", "EXISTS", "MGET", "PSUBSCRIBE", "PUNSUBSCRIBE", "SUBSCRIBE", "TOUCH", "UNLINK", "UNSUBSCRIBE", "WATCH")
}
_SCRIPTS, _STREAMS = {"EVAL", "EVALSHA", "FCALL"}, {"XREAD", "XREADGROUP"}


class PrefixPacker:
    """Serialiser of Redis commands that adds a prefix to keys and channels, and otherwise works like redis-py."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._plain = PythonRespSerializer(_CUTOFF, _encoded)

    def pack(self, *command: Any) -> list[Any]:
        """Return the pieces to send for a command, given as its name and arguments."""
        name, *arguments = command
        for index in _keys(str_if_bytes(name).split()[0].upper(), arguments):
            arguments[index] = self._prefix + _encoded(arguments[index])
        return self._plain.pack(name, *arguments)

    def strip(self, key: bytes) -> bytes:
        """Return a key from Redis without the prefix."""
        return key.removeprefix(self._prefix)


def _keys(name: str, arguments: list[Any]) -> range:
    """Return the indices of the arguments that are keys, channels or patterns; for most commands the first argument."""
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
        pattern = words.index("MATCH") + 1  # without a pattern it would return keys without the prefix
        return range(pattern, pattern + 1)
    return range(min(1, len(arguments)))


def _encoded(argument: Any) -> Any:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


# Reports carry the time of the server, because the clocks of writers and readers may differ.
_WRITE = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now[1] * 1000 + now[2] / 1000) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('EXISTS', KEYS[2])
"""

# The script also writes, so that a Redis that is full or a replica gives an error instead of an empty result.
_READ = """
local now = redis.call('TIME')
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
end
local milliseconds = now[1] * 1000 + now[2] / 1000
local fields = redis.call('HGETALL', KEYS[1])
local fresh = {}
for i = 1, #fields, 2 do
  local space = string.find(fields[i + 1], ' ', 1, true)
  -- A report from the future was written before the clock was set back.
  if math.abs(milliseconds - tonumber(string.sub(fields[i + 1], 1, space - 1))) > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    fresh[#fresh + 1] = fields[i]
    fresh[#fresh + 1] = string.sub(fields[i + 1], space + 1)
  end
end
return fresh
"""


class LiveReports(Generic[_Kind]):
    """Reports that expire, one per writer, in a Redis hash; each method makes one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or the key holds data of another kind.
    """

    def __init__(self, client: redis.Redis, key: str, kind: type[_Kind] | Any, content: str) -> None:
        """Use the hash under ``key``.

        Args:
            client: the connection to Redis.
            key: the key of the hash.
            kind: the type of a report.
            content: the name of the reports in error messages.
        """
        self._client, self._key, self._kind, self._content = client, key, kind, content
        self._keys = [key, f"{key}:read"]
        self._write, self._read = client.register_script(_WRITE), client.register_script(_READ)

    def write(self, name: str, report: _Kind, expiry_ms: int, pipeline: redis.Redis | None = None) -> Any:
        """Write the report of a writer, in place of its previous one.

        Args:
            name: the name of the writer.
            report: the report.
            expiry_ms: milliseconds after which Redis deletes the hash if no writer reports.
            pipeline: a pipeline to queue the command in.

        Returns:
            1 if a process reads the reports at present, else 0; a pipeline returns it when it is executed.
        """
        return self._write(self._keys, [name, msgspec.json.encode(report), expiry_ms], pipeline)

    def read(self, expiry_ms: int, attention_ms: int) -> dict[str, _Kind]:
        """Return the reports of the last ``expiry_ms`` milliseconds by the name of the writer.

        For the next ``attention_ms`` milliseconds, writers see that their reports are read.

        Raises:
            redis.exceptions.RedisError: Redis does not answer, or cannot be written now.
        """
        fields: list[bytes] = self._read(self._keys, [expiry_ms, attention_ms])
        return {
            name.decode(errors="replace"): decoded(data, self._kind, self._content)
            for name, data in zip(fields[::2], fields[1::2], strict=True)
        }

    def withdraw(self, name: str) -> None:
        """Delete the report of a writer that ends."""
        self._client.hdel(self._key, name)
