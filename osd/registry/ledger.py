"""The trainer's side of the ledger, where serving reads it: seconds of compute spent on each version."""

from __future__ import annotations

from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Spent(msgspec.Struct, frozen=True):
    """CPU seconds of the trainer: ``by_version`` those that led to each, ``unpublished`` those since the last one."""

    by_version: dict[int, _Seconds] = {}
    unpublished: _Seconds = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_version.values()) + self.unpublished


class Ledger(RedisClient):
    """Reads and sets what was spent on a domain, one round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
        ValueError: the domain is not a valid name.
    """

    def get(self, domain: str) -> Spent:
        """What was spent; nothing when nobody has said so."""
        data = self._client.get(_key(domain))
        return Spent() if data is None else decoded(data, Spent, f"ledger of {domain}")

    def set(self, domain: str, spent: Spent) -> None:
        """Say what was spent."""
        self._client.set(_key(domain), msgspec.json.encode(spent))


def _key(domain: str) -> str:
    return f"osd:ledger:{check_domain(domain)}"
