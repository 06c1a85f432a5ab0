"""Ring of frames in shared memory, from one producer to one consumer in another process.

Neither process waits for the other: a full ring drops the new frame and counts it. The memory stays when the consumer
dies, and the next consumer continues at the first frame that was not taken.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from osd.vllm.steps import Buffer

CAPACITY = 256 << 20
"""Bytes of a ring: a stall of one second at 20,000 tokens per second.

A token takes 12.9 KB with 32 log-probabilities and three states of 4,096 numbers in 8 bits, and a step of 1,000 tokens
takes 12.9 MB. A step that reads 16,384 tokens of prompts takes 208 MB and fits too.
"""

COUNTERS = (
    *("frames", "dropped", "dropped_bytes", "dropped_requests"),
    *("requests", "damaged", "holes", "refused", "closed", "traces", "empty", "gaps", "limited", "expired", "purged"),
    *("written", "lost_assembler", "lost_queue", "lost_closed", "lost_encoding", "lost_redis"),
)
"""Names of the counters in a ring; the producer counts the first four, and the consumer all others."""

_FOLDER = "/dev/shm"  # noqa: S108 - where the kernel shows shared memory
_HEADER = mmap.PAGESIZE
_WORD = 8
_SIZE, _WRITTEN, _TAKEN, _FIRST_COUNTER = range(4)  # words of the header
_FRAME = struct.Struct("<QQII")  # number, length, begun requests, checksum


class RingError(OSError):
    """Shared memory that cannot be created, or that holds no ring."""


class Frame(NamedTuple):
    """Frame with its number; a number that is missing belongs to a dropped frame."""

    number: int
    data: bytes


class Ring:
    """Ring of frames; ``put`` is for one thread of the producer, ``get`` for one thread of the consumer.

    Attributes:
        name: the name of the shared memory.
        capacity: the number of bytes for frames.
    """

    def __init__(self, memory: mmap.mmap | memoryview, name: str, release: Callable[[], None]) -> None:
        """Use memory with a header; ``create`` and ``attach`` call this method."""
        self.name, self._release = name, release
        self._header: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, _HEADER // _WORD)
        self._data: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=_HEADER)
        self.capacity = len(self._data)
        self._number = 0

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> Ring:
        """Create a ring of at least ``capacity`` bytes that only this user can open; its memory is reserved at once.

        Raises:
            RingError: there is not enough shared memory.
        """
        size = _HEADER + -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        owner = SharedMemory(create=True, size=size)

        def release() -> None:
            owner.close()
            owner.unlink()

        try:
            # Without a reservation, a write beyond the limit of the file system would end this process (SIGBUS).
            with open(_path(owner.name), "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            release()
            raise RingError(
                f"{size >> 20} MiB of shared memory are not available ({error.strerror}): enlarge {_FOLDER}"
            ) from None
        ring = cls(cast(memoryview, owner.buf), owner.name, release)
        ring._header[_SIZE] = ring.capacity
        return ring

    @classmethod
    def attach(cls, name: str) -> Ring:
        """Open the ring of another process.

        Raises:
            RingError: there is no shared memory of this name, or it holds no ring.
        """
        # Until Python 3.13, SharedMemory registers attached memory too, and deletes it when this process ends.
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise RingError(f"there is no ring {name}: {error.strerror}") from None
        try:
            size = os.fstat(descriptor).st_size
            memory = mmap.mmap(descriptor, size) if size > _HEADER else None
        finally:
            os.close(descriptor)
        if memory is None:
            raise RingError(f"{name} holds no ring")
        ring = cls(memory, name, memory.close)
        if int(ring._header[_SIZE]) != ring.capacity:
            ring.close()
            raise RingError(f"{name} holds no ring")
        return ring

    @property
    def used(self) -> int:
        """Number of bytes that the consumer has not taken."""
        return int(self._header[_WRITTEN]) - int(self._header[_TAKEN])

    def put(self, parts: Sequence[Buffer], begun: int = 0) -> bool:
        """Add a frame; return False when it is dropped, because the ring is full. A dropped frame takes a number too.

        Args:
            parts: the buffers whose concatenation is the frame.
            begun: the number of requests whose capture begins in the frame, for the counters.
        """
        views = [np.frombuffer(part, np.uint8) for part in parts]
        length = sum(map(len, views))
        number, self._number = self._number, self._number + 1
        if not 0 <= self.used <= self.capacity - _space(length):
            self.count("dropped")
            self.count("dropped_bytes", length)
            self.count("dropped_requests", begun)
            return False
        position = int(self._header[_WRITTEN])
        head = _FRAME.pack(number, length, begun, _checksum(number, length, begun, parts))
        at = position
        for view in (np.frombuffer(head, np.uint8), *views):
            self._write(at, view)
            at += len(view)
        # Last, so that the consumer sees whole frames only.
        self._header[_WRITTEN] = position + _space(length)
        self.count("frames")
        return True

    def get(self) -> Frame | None:
        """Take the next frame; return None when there is none.

        A damaged frame makes the position of the next frame unknown. So all waiting frames are skipped, and the counter
        ``damaged`` rises.
        """
        written, position = int(self._header[_WRITTEN]), int(self._header[_TAKEN])
        if written == position:
            return None
        read = self._read_frame(position, written - position)
        if read is None:
            self._header[_TAKEN] = written
            self.count("damaged")
            return None
        frame, begun = read
        # Before the frame is used, so that a frame that ends the consumer does not end the next consumer too.
        self._header[_TAKEN] = position + _space(len(frame.data))
        self.count("requests", begun)  # also before, so that requests of a consumer that ends are known
        return frame

    def count(self, name: str, increment: int = 1) -> None:
        """Increase a counter; each counter belongs to one of both processes."""
        self._header[_FIRST_COUNTER + COUNTERS.index(name)] += np.uint64(increment)

    def counters(self) -> dict[str, int]:
        """Return all counters by name; both processes may read them."""
        values = self._header[_FIRST_COUNTER : _FIRST_COUNTER + len(COUNTERS)].tolist()
        return dict(zip(COUNTERS, values, strict=True))

    def close(self) -> None:
        """Release the memory; the process that created it also deletes it."""
        del self._header, self._data
        self._release()

    def _read_frame(self, position: int, available: int) -> tuple[Frame, int] | None:
        """Return the frame at a position and its number of begun requests, or None when it is damaged."""
        if available > self.capacity:
            return None
        number, length, begun, checksum = _FRAME.unpack(self._read(position, _FRAME.size))
        if _space(length) > available:
            return None
        data = self._read(position + _FRAME.size, length)
        return (Frame(number, data), begun) if _checksum(number, length, begun, [data]) == checksum else None

    def _write(self, position: int, view: NDArray[np.uint8]) -> None:
        start = position % self.capacity
        first = min(len(view), self.capacity - start)
        self._data[start : start + first] = view[:first]
        self._data[: len(view) - first] = view[first:]

    def _read(self, position: int, length: int) -> bytes:
        start = position % self.capacity
        first = min(length, self.capacity - start)
        return self._data[start : start + first].tobytes() + self._data[: length - first].tobytes()


def remove(name: str) -> None:
    """Delete the ring of a process that ended without doing so."""
    with suppress(FileNotFoundError):
        os.unlink(_path(name))


def _path(name: str) -> str:
    return os.path.join(_FOLDER, os.path.basename(name))


def _checksum(number: int, length: int, begun: int, parts: Sequence[Buffer]) -> int:
    checksum = zlib.crc32(struct.pack("<QQI", number, length, begun))
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _space(length: int) -> int:
    """Return the bytes of a frame, rounded up to words."""
    return -(-(_FRAME.size + length) // _WORD) * _WORD
