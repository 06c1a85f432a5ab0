"""Several processes share what they decode, through a stream in Redis."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis.exceptions import RedisError

from osd.recall.memory import ORDERS, Backend, Memory
from osd.redis_client import Backoff, connect
from osd.vllm.settings import REDIS_URL, SettingsError

log = logging.getLogger(__name__)

RECORDS = 16_384
"""Records of a stream, about; with 4,000 bytes of ids each at most, it takes 70 MB at most."""
KEPT_DAYS = 7
"""Days after which a stream goes that nobody writes to."""
LONGEST = 1000
"""Token ids of a record at most, contexts included."""
_HEAD = 2
_PERIOD = 0.5  # seconds between two looks
_SAID, _UNSENT = 1 << 14, 1 << 10  # calls of say() that wait at most, and records
_READ = 16
_STEP, _REST = 32, 0.001  # tokens learnt at a time, which takes some 50 us, and seconds until the next
_EXPECTED = "redis://[:password@]host:port/db, rediss:// or redis+sentinel://host:port,host:port/service/db"


@dataclass
class Fragment:
    """``tokens`` that a target said after ``context``, which are the last few tokens before them."""

    context: Sequence[int]
    tokens: list[int]

    @property
    def end(self) -> list[int]:
        """The context of what comes next."""
        return [*self.context, *self.tokens][-ORDERS:]


def encoded(fragments: Iterable[Fragment]) -> Iterator[bytes]:
    """Records of at most ``LONGEST`` ids: of each fragment two lengths, context and tokens, 32 bits little-endian."""
    record: list[int] = []
    for fragment in fragments:
        rest = fragment
        while rest.tokens:
            if len(record) + _HEAD + ORDERS >= LONGEST:
                yield _packed(record)
                record = []
            room = LONGEST - len(record) - _HEAD - len(rest.context)
            part = Fragment(rest.context, rest.tokens[:room])
            record += len(part.context), len(part.tokens), *part.context, *part.tokens
            rest = Fragment(part.end, rest.tokens[room:])
    if record:
        yield _packed(record)


def decoded(data: bytes, vocabulary: int) -> list[Fragment]:
    """The fragments of a record; none of one that is damaged or holds ids that are not below ``vocabulary``."""
    if len(data) % 4 or len(data) > 4 * LONGEST:
        return []
    numbers = np.frombuffer(data, "<i4").tolist()
    found: list[Fragment] = []
    place = 0
    while place < len(numbers):
        context, tokens = (*numbers[place : place + _HEAD], 0)[:_HEAD]
        begin = place + _HEAD + context
        place = begin + tokens
        ids = numbers[begin - context : place]
        if not (0 <= context <= ORDERS and tokens > 0 and place <= len(numbers)):
            return []
        if not all(0 <= token < vocabulary for token in ids):
            return []
        found.append(Fragment(ids[:context], ids[context:]))
    return found


def _packed(record: Sequence[int]) -> bytes:
    return np.array(record, "<i4").tobytes()


class Sharing:
    """Writes what this process decodes and learns what others do, on a thread of its own; one for each process.

    Without Redis each process goes on alone. What could not be written waits, as far as there is room, and what others
    wrote meanwhile is learnt later. A process that starts learns what the stream still holds.
    """

    def __init__(self, url: str, spoken: str, vocabulary: int, memory: Memory, backend: Backend) -> None:
        """Share with those that have the same ``spoken``, which names model and tokenizer.

        Raises:
            SettingsError: ``url`` is no URL of Redis.
        """
        try:
            self._client = connect(url)
        except ValueError:
            # The parser's own message may quote a piece of the password.
            raise SettingsError(f"{REDIS_URL} is no URL of Redis, expected {_EXPECTED}") from None
        self._stream, self._writer = f"osd:vllm:{spoken}", secrets.token_hex(8).encode()
        self._vocabulary, self._memory, self._text = vocabulary, memory, backend.text(LONGEST)
        self._said: deque[tuple[int, Sequence[int], Sequence[int]]] = deque(maxlen=_SAID)
        self._unsent: deque[bytes] = deque(maxlen=_UNSENT)
        self._backoff, self._last = Backoff(), b"0-0"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="osd-sharing", daemon=True)
        self._thread.start()

    def say(self, request: int, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Share ``tokens`` that the target said after ``context``, the end of a request's text; never waits."""
        self._said.append((request, context, tokens))

    def close(self) -> None:
        """Write what waits, if Redis takes it, and stop."""
        self._stopped.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            self._turn()
        self._turn()

    def _turn(self) -> None:
        self._unsent.extend(encoded(self._fragments()))
        if self._backoff.remaining:
            return
        try:
            self._write()
            for data in self._read():
                self._learn(data)
        except (RedisError, OSError, ValueError) as error:
            if not self._backoff.failing:
                log.warning("nothing is shared while Redis fails (%s): %s", REDIS_URL, " ".join(str(error).split()))
            self._backoff.failed()
        else:
            if self._backoff.failing:
                log.warning("Redis is back: what is decoded is shared again")
            self._backoff.worked()

    def _fragments(self) -> list[Fragment]:
        """What was said since, that of each request in one piece where it goes on."""
        found: list[Fragment] = []
        latest: dict[int, Fragment] = {}
        for _ in range(len(self._said)):
            request, context, tokens = self._said.popleft()
            before = latest.get(request)
            if before is not None and before.end == list(context):
                before.tokens.extend(tokens)
            else:
                latest[request] = Fragment(context, list(tokens))
                found.append(latest[request])
        return found

    def _write(self) -> None:
        while self._unsent:
            fields: Any = {b"writer": self._writer, b"said": self._unsent[0]}
            self._client.xadd(self._stream, fields, maxlen=RECORDS, approximate=True)
            self._unsent.popleft()
            if len(self._unsent) % _READ == 0:
                self._client.expire(self._stream, KEPT_DAYS * 86_400)

    def _read(self) -> Iterator[bytes]:
        newest: Any = self._client.xrevrange(self._stream, count=1)
        if not newest or _order(newest[0][0]) < _order(self._last):
            self._last = b"0-0"  # another Redis, or one that has lost it all
        while newest and self._last != newest[0][0] and not self._stopped.is_set():
            entries: Any = self._client.xrange(self._stream, min=b"(" + self._last, count=_READ)
            for id, fields in entries:
                self._last = id
                if fields.get(b"writer") != self._writer:
                    yield fields.get(b"said", b"")
            if not entries:
                return

    def _learn(self, data: bytes) -> None:
        now = int(time.time())
        for fragment in decoded(data, self._vocabulary):
            self._text.clear()
            self._text.append(fragment.context, certain=False)
            tokens = np.array(fragment.tokens, np.int32)
            for place in range(0, len(tokens), _STEP):
                self._memory.hear(self._text, tokens[place : place + _STEP], drafted=False, now=now)
                time.sleep(_REST)  # whoever proposes waits for the interpreter's lock no longer than for one step


def _order(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)
