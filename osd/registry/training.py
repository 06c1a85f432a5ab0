"""Reports of trainers in Redis, which serving reads: counts, costs, the fund, and effects of versions."""

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
    """Measured effect of a version in service, in comparison with the version before.

    Attributes:
        number: number of the version.
        before: number of the version before.
        log: logarithm of the speed-up.
        width: half the width of the confidence interval of ``log``; None before it is known.
        trials: number of trials that measured it.
        resting: number of replicas in which the trained drafter rests, because no gain over recall alone is measured.
    """

    number: int
    before: int
    log: float = 0.0
    width: float | None = None
    trials: int = 0
    resting: int = 0

    @property
    def is_decided(self) -> bool:
        """Whether the version is certainly faster or slower than the one before."""
        return self.width is not None and abs(self.log) > self.width


class FundReport(msgspec.Struct, frozen=True):
    """State of a domain's fund, in core seconds; see ``osd.economy.training``.

    Attributes:
        begins: whether the next slice of training begins at the present price.
        fund: balance of the fund.
        needed: balance that the next slice needs.
        certain: lower bound of the core seconds that versions have saved.
        saved: estimate of the core seconds that versions have saved.
        effects: effects of the versions that came into service since the account began or since drift; none for a mixed
            drafter.
        trial: effect of the version on trial; None without a trial.
        over_recall: effect of a mixed drafter over recall alone; None for other drafters.
        log: logarithm of the measured speed-up of all ``effects`` together, or over recall alone; None before it is
            known.
        width: half the width of its confidence interval.
        paid_back: time at which certain savings reached the cost of training, in seconds since the epoch; None before.
        worth: forecast of the core seconds per second that the next version saves; None before the first gate.
    """

    begins: bool = True
    fund: float = 0.0
    needed: float = 0.0
    certain: float = 0.0
    saved: float = 0.0
    effects: tuple[VersionEffect, ...] = ()
    trial: VersionEffect | None = None
    over_recall: VersionEffect | None = None
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
        """Effect of the version on trial, else of the latest version in service if it is not decided yet."""
        if self.trial is not None or not self.effects:
            return self.trial
        return None if self.effects[-1].is_decided else self.effects[-1]


class Training(msgspec.Struct, frozen=True):
    """Report on the training of a domain's drafter since its first start.

    Attributes:
        steps: number of micro-steps.
        skipped: number of micro-steps without effect.
        positions: number of completion positions trained on, repeats included.
        records: number of records received.
        trained: number of records trained on.
        held_out: number of records held out for evaluation.
        refused: number of records refused.
        passed: number of candidates that passed the gate.
        rejected: number of candidates that the gate rejected.
        drifts: number of drift alarms.
        cpu_seconds: CPU seconds of training.
        beside_seconds: CPU seconds of training while requests ran.
        slowed_seconds: core seconds that replicas lost because of training.
        replay_records: number of records in the replay buffer.
        replay_tokens: number of tokens in the replay buffer.
        replay_bytes: bytes of the replay buffer.
        lag: number of unacknowledged records; None while Redis does not answer.
        lag_seconds: age of the oldest unacknowledged record; None while Redis does not answer.
        loss: loss of the last micro-step.
        account: state of the fund.
        states_wanted: share of records whose hidden states the trainer asks for.
        state: "waiting", "training", "yielding" (to requests), "paused" or "stopped"; "" in reports without a state.
        detail: reason of the state, in one line; "" if there is none.
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
    account: FundReport | None = None
    states_wanted: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    state: str = ""
    detail: str = ""

    @property
    def cost(self) -> float:
        """Core seconds of training, plus the core seconds that replicas lost."""
        return self.cpu_seconds + self.slowed_seconds

    @property
    def activity(self) -> str:
        """State with its reason, such as "waiting: 5 of 12 records to start with"."""
        return f"{self.state}: {self.detail}" if self.detail else self.state

    def at_least(self, before: Training) -> Training:
        """Return the report with each count at least as high as in an earlier report.

        A trainer that continues from an older checkpoint has not yet repeated all the work that it had reported.
        """
        return msgspec.structs.replace(
            self, **{name: max(getattr(self, name), getattr(before, name)) for name in (*_COUNTS, *_SECONDS)}
        )


class TrainingReports(RedisClient):
    """Reports of training in Redis; each method makes one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or a key holds data of another kind.
        ValueError: a domain is not a valid name.
    """

    def get(self, domains: Sequence[str]) -> dict[str, Training]:
        """Return the reports by domain; domains without a report are left out."""
        values = self._client.mget([_key(domain) for domain in domains])
        return {
            domain: decoded(data, Training, f"training of {domain}")
            for domain, data in zip(domains, values, strict=True)
            if data is not None
        }

    def set(self, domain: str, training: Training) -> None:
        """Replace the report of a domain."""
        self._client.set(_key(domain), msgspec.json.encode(training))


def _key(domain: str) -> str:
    return f"osd:training:{check_domain(domain)}"
