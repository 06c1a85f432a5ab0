"""API keys, their rights and limits, and the caller of a request."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request

MOST_PRIORITY = 1000
"""Largest priority of a request; the priority of a key lies between -1000 and 1000."""

Right = Literal["generate", "watch", "administer"]
"""Rights of a key: generate tokens, read metrics and the dashboard, or change the drafters in service."""


@dataclass(frozen=True)
class Limits:
    """Limits of a key; None means unlimited. Tokens are those of prompts and completions."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __bool__(self) -> bool:
        return self != _NONE


_NONE = Limits()


@dataclass(frozen=True)
class Key:
    """API key.

    Attributes:
        name: unique name of the key.
        hashes: SHA-256 hashes of its secrets; each secret is valid.
        may: rights.
        tenant: tenant that the key belongs to; "" for none.
        limits: rate limits and quotas.
        expires: time of expiry in seconds since 1970; None for a key that never expires.
        priority: number that is added to the priority of each request; lower values are served first.
    """

    name: str
    hashes: tuple[bytes, ...] = field(repr=False)
    may: frozenset[Right]
    tenant: str = ""
    limits: Limits = _NONE
    expires: float | None = None
    priority: int = 0

    def allows(self, right: Right) -> bool:
        """Return whether the key has a right. The right to administer includes the right to watch."""
        return right in self.may or (right == "watch" and "administer" in self.may)

    def opens(self, hashed: bytes) -> bool:
        """Return whether ``hashed`` is the hash of a valid secret of this key; compared in constant time."""
        matches = False
        for known in self.hashes:
            matches |= hmac.compare_digest(known, hashed)
        return matches and (self.expires is None or time.time() < self.expires)


def hash_of(secret: bytes) -> bytes:
    """Return the SHA-256 hash of a secret; secrets are stored only as hashes."""
    return hashlib.sha256(secret).digest()


STATE = "caller"
"""Key of the ``Caller`` in the state of an ASGI scope."""


@dataclass(frozen=True)
class Caller:
    """Sender of a request.

    Attributes:
        key: key of the request; None without a valid key.
        client: identifier of the client, see ``client_of``. Clients never share cached prompts.
        free: rights that need no key.
    """

    key: Key | None
    client: str
    free: frozenset[Right] = frozenset()

    @property
    def tenant(self) -> str:
        """Tenant of the key; "" for none."""
        return self.key.tenant if self.key else ""

    def may(self, right: Right) -> bool:
        """Return whether the caller has a right."""
        return right in self.free or (self.key is not None and self.key.allows(right))


def caller_of(request: Request) -> Caller:
    """Return the caller that ``KeyGuard`` stored in the request."""
    return getattr(request.state, STATE)


def bearer_of(headers: Headers) -> bytes | None:
    """Return the secret of the ``Authorization: Bearer`` header; None without that header."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else None


def client_of(key: Key | None, secret: bytes | None) -> str:
    """Return the identifier of a client.

    All keys of a tenant are the same client. A key without a tenant is its own client, whichever of its secrets is
    used. Without a key, the secret identifies the client; without a secret the identifier is "".
    """
    if key is None:
        return _hash(secret, b"osd-client") if secret else ""
    return _hash(key.tenant.encode(), b"osd-tenant") if key.tenant else _hash(key.name.encode(), b"osd-key")


def _hash(name: bytes, kind: bytes) -> str:
    return hashlib.blake2b(name, digest_size=16, person=kind).hexdigest()
