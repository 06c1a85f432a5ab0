"""What the trainer says of its work, where serving reads it: what it has done, what it has at hand, what it expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded

_Count = Annotated[int, msgspec.Meta(ge=0)]
_COUNTS = ("steps", "skipped", "positions", "records", "trained", "held_out", "refused", "passed", "rejected", "drifts")


class Expected(msgspec.Struct, frozen=True):
    """What the next slice of learning is expected to bring: see ``osd.learning.value.Investment``."""

    pays: bool
    saving_rate: float
    horizon: float
    earns: float
    costs: float

    @property
    def net(self) -> float:
        """Seconds of a core that it earns beyond its cost, 0 where it does not pay."""
        return max(self.earns - self.costs, 0.0)


class Training(msgspec.Struct, frozen=True):
    """What training of a domain's drafter has done since its first start.

    Micro-``steps``, of which ``skipped`` taught nothing, were on so many ``positions``, repeats included; ``records``
    came, of which ``trained`` were trained on, ``held_out`` only judge, and others were ``refused``; candidates
    ``passed`` the gate or were ``rejected``. Acceptance fell so many times (``drifts``). At hand are ``replay_records``
    with their tokens and bytes; ``lag`` records are not acknowledged, the oldest made ``lag_seconds`` ago, None where
    Redis does not say. ``cpu_seconds`` are those of ``osd.registry.ledger.Spent.cpu``. The hidden states of a share
    ``states_wanted`` of the records are of use.
    """

    steps: _Count = 0
    skipped: _Count = 0
    positions: _Count = 0
    records: _Count = 0
    trained: _Count = 0
    held_out: _Count = 0
    refused: _Count = 0
    passed: _Count = 0
    rejected: _Count = 0
    drifts: _Count = 0
    cpu_seconds: float = 0.0
    slowed_seconds: float = 0.0
    replay_records: int = 0
    replay_tokens: int = 0
    replay_bytes: int = 0
    lag: int | None = None
    lag_seconds: float | None = None
    loss: float | None = None
    expected: Expected | None = None
    states_wanted: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    def at_least(self, before: Training) -> Training:
        """The same where no count is below what was told ``before``.

        A trainer that went on from an older checkpoint has not yet done again what it had told.
        """
        names = (*_COUNTS, "cpu_seconds", "slowed_seconds")
        return msgspec.structs.replace(
            self, **{name: max(getattr(self, name), getattr(before, name)) for name in names}
        )


class TrainingReports(RedisClient):
    """Reads and sets what is said of training, one round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
        ValueError: a domain is not a valid name.
    """

    def get(self, domains: Sequence[str]) -> dict[str, Training]:
        """What was said of those ``domains`` of which something was."""
        found = self._client.mget([_key(domain) for domain in domains])
        return {
            domain: decoded(data, Training, f"training of {domain}")
            for domain, data in zip(domains, found, strict=True)
            if data is not None
        }

    def set(self, domain: str, training: Training) -> None:
        """Say it."""
        self._client.set(_key(domain), msgspec.json.encode(training))


def _key(domain: str) -> str:
    return f"osd:training:{check_domain(domain)}"
