"""A key: what tells who asks, and what they may."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

MOST_PRIORITY = 1000
"""Of a request at most, and of a key in either direction."""

Right = Literal["generate", "watch", "administer"]
"""What a key may: have tokens generated, read metrics and the dashboard, or change what is in service."""


@dataclass(frozen=True)
class Limits:
    """How many requests and tokens, of prompts and completions, a key may have; None for any number."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __bool__(self) -> bool:
        return self != _NONE


_NONE = Limits()


@dataclass(frozen=True)
class Key:
    """A key by its name: any secret with one of the SHA-256 ``hashes`` is it, until ``expires``, in seconds since 1970.

    ``tenant`` is whose it is, "" for nobody's. The ``priority`` of its requests is added to what they say: the less,
    the sooner they come.
    """

    name: str
    hashes: tuple[bytes, ...] = field(repr=False)
    may: frozenset[Right]
    tenant: str = ""
    limits: Limits = _NONE
    expires: float | None = None
    priority: int = 0

    def allows(self, right: Right) -> bool:
        """Whether it has a right; who may administer may watch."""
        return right in self.may or (right == "watch" and "administer" in self.may)

    def opens(self, hashed: bytes) -> bool:
        """Whether a secret with this hash is this key now; compared in constant time."""
        found = False
        for known in self.hashes:
            found |= hmac.compare_digest(known, hashed)
        return found and (self.expires is None or time.time() < self.expires)


def hash_of(secret: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret).digest()
