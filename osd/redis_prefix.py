"""A prefix for every key, put there where commands are written to the wire."""

from __future__ import annotations

from typing import Any

from redis.connection import PythonRespSerializer
from redis.utils import str_if_bytes

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
