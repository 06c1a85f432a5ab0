"""Text that a target wrote once, with its hidden states and distributions, kept to be replayed.

Greedy output does not depend on the drafter, so a recorded stream serves every experiment on it. One file holds the
records of one stream for one target and one length, each of them framed: its size, a checksum and a trace. Records are
only ever appended; what a crash left incomplete at the end is cut off before the next one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import filelock
import numpy as np

from osd.capture.trace import Trace, decode, encode

_HEAD = struct.Struct("<Q16s")


class RecordingError(ValueError):
    """A recording cannot be used; the message is one line that says what to do."""


@dataclass(frozen=True)
class Take:
    """What fixes a recorded text: the target and its dtype, the tapped layers, and how much is written and kept."""

    target: str
    dtype: str
    taps: tuple[int, ...]
    tokens: int
    top_k: int

    def key(self) -> str:
        """The same for the same text, in every process."""
        facts = json.dumps([self.target, self.dtype, self.taps, self.tokens, self.top_k])
        return hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Asked:
    """One prompt to record: the id that it has in a recording, its domain, and its tokens."""

    id: str
    domain: str
    prompt_ids: tuple[int, ...]

    @classmethod
    def of(cls, domain: str, prompt_ids: Sequence[int]) -> Asked:
        """Name a prompt by its tokens, so that the same prompt is recorded once whatever file it stands in."""
        digest = hashlib.blake2b(np.array(prompt_ids, np.int32).tobytes(), digest_size=12)
        return cls(digest.hexdigest(), domain, tuple(prompt_ids))


class Recording:
    """The records of one stream for one take, under ``home``/recordings."""

    def __init__(self, home: Path, stream: str, take: Take) -> None:
        self.take = take
        self.path = home / "recordings" / f"{stream}-{take.key()}.traces"

    def read(self, wanted: Iterable[str]) -> dict[str, Trace]:
        """The records with these ids that are there."""
        names = set(wanted)
        if not self.path.is_file():
            return {}
        with self.path.open("rb") as file:
            return {trace.request_id: trace for trace, _ in _records(file) if trace.request_id in names}

    def ids(self) -> set[str]:
        """What is recorded so far."""
        if not self.path.is_file():
            return set()
        with self.path.open("rb") as file:
            return {trace.request_id for trace, _ in _records(file)}

    def append(self) -> Writer:
        """Take the right to append; a context manager.

        Raises:
            RecordingError: another process is recording the same.
        """
        return Writer(self.path)


class Writer:
    """Appends records, each flushed before the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = filelock.FileLock(path.with_suffix(".lock"), blocking=False)
        self._file: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise RecordingError(f"another process is recording {self._path.name}; wait for it") from None
        self._path.touch()
        self._file = self._path.open("r+b")
        whole = 0
        for _, end in _records(self._file):
            whole = end
        self._file.truncate(whole)
        self._file.seek(whole)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def add(self, trace: Trace) -> None:
        """Append a record."""
        if self._file is None:
            raise RecordingError("the recording is not open")
        data = encode(trace)
        self._file.write(_HEAD.pack(len(data), _checksum(data)) + data)
        self._file.flush()


def _records(file: BinaryIO) -> Iterator[tuple[Trace, int]]:
    """Every whole record from the start on, and where it ends."""
    file.seek(0)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, checksum = _HEAD.unpack(head)
        data = file.read(size)
        if len(data) != size or _checksum(data) != checksum:
            return
        yield decode(data), file.tell()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
