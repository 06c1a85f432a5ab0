"""Stable hash of bytes to a number in [0, 1), for draws that agree in all processes."""

from __future__ import annotations

import hashlib


def unit_hash(data: bytes, salt: bytes = b"") -> float:
    """Return a number in [0, 1) that depends only on ``data`` and ``salt`` and is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "big") / 2**64
