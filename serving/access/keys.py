"""Keys and callers: what tells who asks, and what they may."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request

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


STATE = "caller"
"""Where the state of an ASGI scope has it."""


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request, by the ``key`` that was given, None for none, and what is ``free`` to all.

    ``client`` tells clients apart, of which one's prompts are no part of another's.
    """

    key: Key | None
    client: str
    free: frozenset[Right] = frozenset()

    @property
    def tenant(self) -> str:
        """The tenant of the key, "" for none."""
        return self.key.tenant if self.key else ""

    def may(self, right: Right) -> bool:
        """Whether something is allowed."""
        return right in self.free or (self.key is not None and self.key.allows(right))


def caller_of(request: Request) -> Caller:
    """Who sent a request."""
    return getattr(request.state, STATE)


def bearer_of(headers: Headers) -> bytes | None:
    """The secret of ``Authorization: Bearer``, None without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else None


def client_of(key: Key | None, secret: bytes | None) -> str:
    """What tells clients apart: all of a tenant are one, else those of a key are, whatever its secret is today.

    Where no key is asked for it is whatever secret is given, "" without one.
    """
    if key is None:
        return _hash(secret, b"osd-client") if secret else ""
    return _hash(key.tenant.encode(), b"osd-tenant") if key.tenant else _hash(key.name.encode(), b"osd-key")


def _hash(name: bytes, kind: bytes) -> str:
    return hashlib.blake2b(name, digest_size=16, person=kind).hexdigest()
