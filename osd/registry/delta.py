"""Compressed difference between two files of equal size.

Consecutive versions of weights differ little: their exclusive or is zero in sign, exponent and high bits nearly
everywhere. The bytes of each number go to separate planes, so that these zeros are contiguous and compress well.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

_NUMBER_BYTES = 4  # of a float32; a pair of bfloat16 fills the same four bytes and compresses as well
_COMPRESSION_LEVEL = 1


def encode(data: bytes, base: bytes) -> bytes:
    """Return the difference from which ``decode`` restores ``data``, given ``base``.

    Raises:
        ValueError: ``data`` and ``base`` differ in size.
    """
    return zlib.compress(_split_planes(_exclusive_or(data, base)), _COMPRESSION_LEVEL)


def decode(delta: bytes, base: bytes) -> bytes:
    """Return the data that ``encode`` received together with the same ``base``.

    A wrong base of the right size gives wrong data without an error. The caller has to check the hash of the data.

    Raises:
        ValueError: ``delta`` is not a delta, or its base has another size.
    """
    decompressor = zlib.decompressobj()
    try:
        difference = decompressor.decompress(delta, len(base) + 1)
    except zlib.error as error:
        raise ValueError(f"not a delta ({error})") from None
    return _exclusive_or(_join_planes(difference), base).tobytes()


def _exclusive_or(data: bytes, base: bytes) -> NDArray[np.uint8]:
    if len(data) != len(base):
        raise ValueError(f"{len(data)} bytes do not fit a base of {len(base)} bytes")
    return np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)


def _split_planes(data: NDArray[np.uint8]) -> bytes:
    """Return the first bytes of all numbers, then the second ones, and so on; an incomplete last number follows."""
    whole = data.size // _NUMBER_BYTES * _NUMBER_BYTES
    return data[:whole].reshape(-1, _NUMBER_BYTES).T.tobytes() + data[whole:].tobytes()


def _join_planes(data: bytes) -> bytes:
    """Undo ``_split_planes``."""
    whole = len(data) // _NUMBER_BYTES * _NUMBER_BYTES
    planes = np.frombuffer(data, np.uint8, whole).reshape(_NUMBER_BYTES, -1)
    return planes.T.tobytes() + data[whole:]
