"""What one file has that another one of the same size has not, in fewer bytes.

The exclusive or of two versions' weights is zero in sign, exponent and high bits nearly everywhere. The bytes of the
numbers are laid apart, all first ones before all second ones, so that the zeros come one after the other.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

_NUMBER = 4  # bytes of a float32; where two bfloat16 lie in its place, each has its bytes laid apart too
_LEVEL = 1


def encode(data: bytes, base: bytes) -> bytes:
    """What makes ``data`` of ``base``.

    Raises:
        ValueError: they differ in size.
    """
    return zlib.compress(_apart(_exclusive_or(data, base)), _LEVEL)


def decode(delta: bytes, base: bytes) -> bytes:
    """The data that ``encode`` was given with the same ``base``; with another one it is something else: check its hash.

    Raises:
        ValueError: it is not a delta, or one for a base of another size.
    """
    unpacker = zlib.decompressobj()
    try:
        difference = unpacker.decompress(delta, len(base) + 1)
    except zlib.error as error:
        raise ValueError(f"not a delta ({error})") from None
    return _exclusive_or(_together(difference), base).tobytes()


def _exclusive_or(data: bytes, base: bytes) -> NDArray[np.uint8]:
    if len(data) != len(base):
        raise ValueError(f"{len(data)} bytes beside {len(base)}")
    return np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)


def _apart(data: NDArray[np.uint8]) -> bytes:
    """All first bytes of the numbers, then all second ones; last what is too short for a number."""
    whole = data.size // _NUMBER * _NUMBER
    return data[:whole].reshape(-1, _NUMBER).T.tobytes() + data[whole:].tobytes()


def _together(data: bytes) -> bytes:
    """Undo ``_apart``."""
    whole = len(data) // _NUMBER * _NUMBER
    planes = np.frombuffer(data, np.uint8, whole).reshape(_NUMBER, -1)
    return planes.T.tobytes() + data[whole:]
