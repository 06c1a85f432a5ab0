"""The trainer's side of the ledger, where serving reads it: seconds of compute spent on each version."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded

_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Spent(msgspec.Struct, frozen=True):
    """Seconds of a core that training took.

    ``by_version`` are those that led to each, ``unpublished`` those since the last one,
    ``older`` are those that led to versions that were removed. ``slowed`` of all were not computed by the trainer, but
    lost by the rounds beside it. ``saving`` is what a version was expected to save when it was published, in seconds of
    a core in each second, against the one before; ``older_saving`` that of the removed ones.
    """

    by_version: dict[int, _Seconds] = {}
    unpublished: _Seconds = 0.0
    older: _Seconds = 0.0
    slowed: _Seconds = 0.0
    saving: dict[int, float] = {}
    older_saving: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_version.values()) + self.unpublished + self.older

    @property
    def cpu(self) -> float:
        """Those that the trainer computed."""
        return self.total - self.slowed

    def payback(self, version: int) -> float | None:
        """Seconds in service until a version has saved what it took; None where it is not expected to, or not known."""
        return _payback(self.by_version.get(version, 0.0), self.saving.get(version, 0.0))

    @property
    def payback_of_all(self) -> float | None:
        """The same for all that was ever spent, and the savings of all versions together."""
        return _payback(self.total, sum(self.saving.values()) + self.older_saving)

    def paybacks(self, version: int) -> dict[str, float | None]:
        """What the manifest of a version says of it: what it took, when it has paid back, and when everything has."""
        seconds = {
            "core_seconds": self.by_version.get(version, 0.0),
            "payback_seconds": self.payback(version),
            "payback_of_all": self.payback_of_all,
        }
        return {name: value if value is None else round(value, 1) for name, value in seconds.items()}

    def published(self, version: int, saving: float) -> Spent:
        """The same when a version came of what was unpublished, expected to save so much."""
        return msgspec.structs.replace(
            self,
            by_version={**self.by_version, version: self.unpublished},
            unpublished=0.0,
            saving={**self.saving, version: saving},
        )

    def only(self, versions: Collection[int]) -> Spent:
        """The same with each of ``versions`` apart, and all others among the older ones."""
        apart = {version: seconds for version, seconds in self.by_version.items() if version in versions}
        folded = sum(seconds for version, seconds in self.by_version.items() if version not in versions)
        saving = {version: rate for version, rate in self.saving.items() if version in versions}
        gone = sum(rate for version, rate in self.saving.items() if version not in versions)
        return msgspec.structs.replace(
            self, by_version=apart, older=self.older + folded, saving=saving, older_saving=self.older_saving + gone
        )


def _payback(spent: float, saving: float) -> float | None:
    """Seconds in which ``saving`` in each brings ``spent`` back; None where it brings nothing."""
    return spent / saving if saving > 0 else None


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
