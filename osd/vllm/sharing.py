"""Sharing of decoded tokens between processes through a Redis stream, and purges of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import RedisError

from osd.capture.purge import SHARED_TOKENS, Member, PurgeFollower, Purges, RemovedData
from osd.recall.memory import ORDERS, Backend, Memory, Text
from osd.redis_client import URL_FORMS, Backoff, connect
from osd.vllm.settings import REDIS_URL, SettingsError

log = logging.getLogger(__name__)

RECORDS = 16_384
"""Approximate limit on the records of a stream; a record has up to 4,000 bytes, so a stream has up to 70 MB."""
KEPT_DAYS = 7
"""Days after the last write until Redis deletes a stream."""
LONGEST = 1000
"""Limit on the token ids of a record, contexts included."""
_HEAD = 2
_PERIOD = 0.5  # seconds between two exchanges with Redis
_PENDING, _UNSENT = 1 << 14, 1 << 10  # limits on waiting calls of share() and on waiting records
_READ = 16
_STEP, _REST = 32, 0.001  # tokens learned at a time, which takes about 50 us, and the pause in seconds after them
_ALL = (1 << 32) - 1  # later than every time of an entry
_CLOCK_MARGIN = 60.0  # seconds by which the clocks of two machines may differ


@dataclass
class Fragment:
    """Tokens of a target, and the ``context`` of up to ``ORDERS`` tokens before them."""

    context: Sequence[int]
    tokens: list[int]

    @property
    def end(self) -> list[int]:
        """Context of the next token."""
        return [*self.context, *self.tokens][-ORDERS:]


def encoded(fragments: Iterable[Fragment]) -> Iterator[bytes]:
    """Yield records of at most ``LONGEST`` integers.

    A record has for each fragment the length of its context, its number of tokens, the context and the tokens, as
    32-bit little-endian integers.
    """
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
    """Return the fragments of a record; [] if the record is damaged or has an id outside the vocabulary."""
    if len(data) % 4 or len(data) > 4 * LONGEST:
        return []
    numbers = np.frombuffer(data, "<i4").tolist()
    fragments: list[Fragment] = []
    at = 0
    while at < len(numbers):
        context, tokens = (*numbers[at : at + _HEAD], 0)[:_HEAD]
        begin = at + _HEAD + context
        at = begin + tokens
        ids = numbers[begin - context : at]
        if not (0 <= context <= ORDERS and tokens > 0 and at <= len(numbers)):
            return []
        if not all(0 <= token < vocabulary for token in ids):
            return []
        fragments.append(Fragment(ids[:context], ids[context:]))
    return fragments


def _packed(record: Sequence[int]) -> bytes:
    return np.array(record, "<i4").tobytes()


class Sharing:
    """Thread that writes the tokens of this process to a stream and learns the tokens of other processes.

    While Redis does not answer, each process works alone. Unwritten records wait in a bounded queue, and records of
    other processes are learned later. A new process learns the whole stream.

    The requests of tokens are not known. So a purge of any request removes all tokens from the table and from Redis,
    and requests that decode at that moment are not learned any more. From then on all processes use another stream, so
    that nothing that a process wrote before it saw the purge is learned.
    """

    def __init__(self, url: str, model_hash: str, vocabulary: int, memory: Memory, backend: Backend) -> None:
        """Start the thread.

        Args:
            url: URL of Redis.
            model_hash: hash of model and tokenizer; processes with equal hashes share tokens.
            vocabulary: size of the vocabulary.
            memory: memory that learns the tokens.
            backend: backend of the memory.

        Raises:
            SettingsError: ``url`` is not a Redis URL.
        """
        try:
            self._client, purges = connect(url), Purges(url)
        except ValueError:
            # The message of the parser may quote a part of the password.
            raise SettingsError(f"{REDIS_URL} is not a Redis URL; expected {URL_FORMS}") from None
        self._name, self._writer = f"{SHARED_TOKENS}{model_hash}", secrets.token_hex(8).encode()
        self._stream, self._started = self._name, time.time()
        member = Member("replica", f"vllm-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}")
        self._purges = PurgeFollower(purges, member, self._forget)
        self._lock = threading.Lock()  # of the two numbers of requests
        self._latest = self._forgotten = 0  # the latest request, and the latest request of the last purge
        self._is_empty = False  # whether a purge of this exchange has emptied the table
        self._vocabulary, self._memory, self._text = vocabulary, memory, backend.text(LONGEST)
        self._pending: deque[tuple[int, Sequence[int], Sequence[int]]] = deque(maxlen=_PENDING)
        self._unsent: deque[bytes] = deque(maxlen=_UNSENT)
        self._backoff, self._last = Backoff(), b"0-0"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="osd-sharing", daemon=True)
        self._thread.start()

    def learn(self, request: int, text: Text, context: Sequence[int], tokens: NDArray[np.int32], now: int) -> None:
        """Learn and share the next ``tokens`` of a request, unless it began before a purge; never waits for Redis.

        Args:
            request: the number of the request; later requests have higher numbers.
            text: the tokens of the request so far, to which the new tokens are appended.
            context: the last of them.
            tokens: the new tokens.
            now: the time in seconds.
        """
        with self._lock:
            self._latest = max(self._latest, request)
            if request > self._forgotten:
                self._memory.learn_tokens(text, tokens, drafted=True, now=now)
                self.share(request, context, tokens.tolist())
            else:
                text.append(tokens.tolist(), certain=True)

    def share(self, request: int, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Queue the next ``tokens`` of a request, which follow ``context``; never blocks."""
        self._pending.append((request, context, tokens))

    def close(self) -> None:
        """Write the waiting records if Redis answers, and stop the thread."""
        self._stopped.set()
        self._thread.join()
        self._purges.close()
        self._client.close()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            self._exchange()
        self._exchange()

    def _exchange(self) -> None:
        self._unsent.extend(encoded(self._fragments()))
        if self._backoff.remaining:
            return
        try:
            self._client.ping()
            self._follow_purges()
            self._write()
            for data in self._read():
                self._learn(data)
        except (RedisError, OSError, ValueError) as error:
            if not self._backoff.failing:
                log.warning("tokens are not shared while Redis fails (%s): %s", REDIS_URL, " ".join(str(error).split()))
            self._backoff.failed()
        else:
            if self._backoff.failing:
                log.warning("Redis answers again: tokens are shared")
            self._backoff.worked()

    def _follow_purges(self) -> None:
        """Apply new purges, and choose the stream by the newest purge."""
        self._is_empty, before = False, self._stream
        self._purges.alive()
        self._purges.update()
        newest = self._purges.newest
        self._stream = f"{self._name}:{int(1000 * newest)}" if newest else self._name
        if self._stream != before:
            self._last = b"0-0"

    def _forget(self, request: str, at: float) -> RemovedData:
        """Remove all tokens, once for all purges of an exchange.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        if self._is_empty or at < self._started - _CLOCK_MARGIN:
            return RemovedData()
        with self._lock:
            self._forgotten = self._latest
            self._pending.clear()
        self._unsent.clear()
        self._client.delete(self._stream)
        self._is_empty = True
        return RemovedData(entries=self._memory.drop(before=_ALL))

    def _fragments(self) -> list[Fragment]:
        """Return the queued tokens; consecutive tokens of a request are merged."""
        fragments: list[Fragment] = []
        latest: dict[int, Fragment] = {}
        for _ in range(len(self._pending)):
            request, context, tokens = self._pending.popleft()
            before = latest.get(request)
            if before is not None and before.end == list(context):
                before.tokens.extend(tokens)
            else:
                latest[request] = Fragment(context, list(tokens))
                fragments.append(latest[request])
        return fragments

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
            self._last = b"0-0"  # a new Redis, or Redis lost its data
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
            for start in range(0, len(tokens), _STEP):
                self._memory.learn_tokens(self._text, tokens[start : start + _STEP], drafted=False, now=now)
                time.sleep(_REST)  # release the interpreter lock, so that the proposer waits for a single step only


def _order(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)
