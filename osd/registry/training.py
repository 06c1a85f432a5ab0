"""Reports of trainers in Redis, which serving reads: counts, costs, the fund, and what versions brought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from osd.config import check_domain
from osd.redis_client import RedisClient, decoded

_Count = Annotated[int, msgspec.Meta(ge=0)]
_COUNTS = ("steps", "skipped", "positions", "records", "trained", "held_out", "refused", "passed", "rejected", "drifts")
_SECONDS = ("cpu_seconds", "beside_seconds", "slowed_seconds")


class VersionEffect(msgspec.Struct, frozen=True):
    """Measured effect of a version in service over the one before.

    Attributes:
        number: of the version.
        before: number of the version before.
        log: logarithm of the speed-up.
        width: half the interval of ``log``; None before it is known.
        trials: that measured it.
    """

    number: int
    before: int
    log: float = 0.0
    width: float | None = None
    trials: int = 0

    @property
    def is_decided(self) -> bool:
        """Whether the version is certainly faster or slower than the one before."""
        return self.width is not None and abs(self.log) > self.width


class Account(msgspec.Struct, frozen=True):
    """State of a domain's fund, in core seconds; see ``osd.economy.training``.

    Attributes:
        begins: whether the next slice of learning begins at the price of the moment.
        fund: content of the fund.
        needed: content that the next slice needs.
        certain: lower bound of what versions saved.
        saved: estimate of what versions saved.
        effects: of the versions in service since the account began or acceptance fell.
        trial: effect of the version on trial; None without a trial.
        log: logarithm of the measured speed-up of ``effects`` together; None before it is known.
        width: half its interval.
        paid_back: when certain savings reached the cost of training, in seconds of the epoch; None while they do not.
        worth: forecast of the core seconds a second that the next version saves; None before any gate.
    """

    begins: bool = True
    fund: float = 0.0
    needed: float = 0.0
    certain: float = 0.0
    saved: float = 0.0
    effects: tuple[VersionEffect, ...] = ()
    trial: VersionEffect | None = None
    log: float | None = None
    width: float | None = None
    paid_back: float | None = None
    worth: float | None = None

    @property
    def measured(self) -> tuple[VersionEffect, ...]:
        """Effects of all versions that serve requests, with the version on trial at the end."""
        return self.effects if self.trial is None else (*self.effects, self.trial)

    @property
    def undecided(self) -> VersionEffect | None:
        """The version on trial, else the latest in service while its effect is not certain."""
        if self.trial is not None or not self.effects:
            return self.trial
        return None if self.effects[-1].is_decided else self.effects[-1]


class Training(msgspec.Struct, frozen=True):
    """Training of a domain's drafter since its first start.

    Micro-``steps``, of which ``skipped`` taught nothing, were on so many ``positions``, repeats included; ``records``
    came, of which ``trained`` were trained on, ``held_out`` only judge, and others were ``refused``; candidates
    ``passed`` the gate or were ``rejected``. Acceptance fell so many times (``drifts``). At hand are ``replay_records``
    with their tokens and bytes; ``lag`` records are not acknowledged, the oldest made ``lag_seconds`` ago, None where
    Redis does not say. Training took ``cpu_seconds``, of which ``beside_seconds`` while requests ran, and replicas lost
    ``slowed_seconds`` of their cores by it. The hidden states of a share ``states_wanted`` of the records are of use.
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
    beside_seconds: float = 0.0
    slowed_seconds: float = 0.0
    replay_records: int = 0
    replay_tokens: int = 0
    replay_bytes: int = 0
    lag: int | None = None
    lag_seconds: float | None = None
    loss: float | None = None
    account: Account | None = None
    states_wanted: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    @property
    def cost(self) -> float:
        """Core seconds that training took and replicas lost by it."""
        return self.cpu_seconds + self.slowed_seconds

    def at_least(self, before: Training) -> Training:
        """Return the same where no count is below what was reported ``before``.

        A trainer that went on from an older checkpoint has not yet done again what it had reported.
        """
        return msgspec.structs.replace(
            self, **{name: max(getattr(self, name), getattr(before, name)) for name in (*_COUNTS, *_SECONDS)}
        )


class TrainingReports(RedisClient):
    """Reads and writes reports of training, one round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
        ValueError: a domain is not a valid name.
    """

    def get(self, domains: Sequence[str]) -> dict[str, Training]:
        """Return the reports of those ``domains`` that have one."""
        found = self._client.mget([_key(domain) for domain in domains])
        return {
            domain: decoded(data, Training, f"training of {domain}")
            for domain, data in zip(domains, found, strict=True)
            if data is not None
        }

    def set(self, domain: str, training: Training) -> None:
        """Write a report."""
        self._client.set(_key(domain), msgspec.json.encode(training))


def _key(domain: str) -> str:
    return f"osd:training:{check_domain(domain)}"
