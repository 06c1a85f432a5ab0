"""Redis connections that fail soon instead of hanging, and when to try again."""

from __future__ import annotations

import time
from typing import Any, Self, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import DataError, ReadOnlyError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from osd.addresses import CA, PREFIX, SENTINEL
from osd.redis_prefix import PrefixPacker

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
