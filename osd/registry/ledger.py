"""The trainer's side of the ledger, where serving reads it: seconds of compute spent on each version."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Spent(msgspec.Struct, frozen=True):
    """CPU seconds of the trainer: ``by_version`` those that led to each, ``unpublished`` those since the last one.

    ``older`` are those that led to versions that were removed.
    """

    by_version: dict[int, _Seconds] = {}
    unpublished: _Seconds = 0.0
    older: _Seconds = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_version.values()) + self.unpublished + self.older

    def only(self, versions: Collection[int]) -> Spent:
        """The same with each of ``versions`` apart, and all others among the older ones."""
        apart = {version: seconds for version, seconds in self.by_version.items() if version in versions}
        folded = sum(seconds for version, seconds in self.by_version.items() if version not in versions)
        return Spent(apart, self.unpublished, self.older + folded)


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
