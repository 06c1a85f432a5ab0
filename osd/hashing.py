"""Chance that every process draws alike: numbers made of names."""

from __future__ import annotations

import hashlib


def unit_hash(data: bytes, salt: bytes = b"") -> float:
    """A number in [0, 1) that depends on ``data`` alone, the same in every process; another for each ``salt``."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "big") / 2**64
