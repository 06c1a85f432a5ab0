"""Who asks: what the routes know of whoever sent a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request

from serving.access.keys import Key, Right

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
