"""Trial of a canary: comparison of the new version with the version in service on live requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from redis.exceptions import RedisError

from osd.capture.trace import Trace
from osd.economy.effect import LEAST_TRIALS, Effect, sequence_width
from osd.economy.report import Comparison, Measured
from osd.learning.drift import tested_tokens
from osd.metrics import acceptance_rate
from osd.registry.replica_loads import ReplicaLoads, UpstreamReport

logger = logging.getLogger(__name__)

FEWEST_RECORDS = 12
"""Requests of each version before a decision; the standard error of fewer requests is unreliable."""

_EFFECT = 0.05
"""Difference at which the confidence sequences are tightest."""

_UPSTREAM_SECONDS = 1.0

CORRUPT_SHARE = 0.5
"""Share of the gate's acceptance rate; a lower live rate means that the served weights are corrupt."""


@dataclass
class Ratio:
    """Ratio of two sums over requests, with the standard error for independent requests."""

    records: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _seen: int = 0  # unweighted sum of the denominators

    def add(self, part: int, whole: int, weight: float = 1.0) -> None:
        """Count one request that represents ``weight`` requests.

        ``part`` and ``whole`` are its contributions to numerator and denominator; a request with ``whole`` 0 is
        ignored.
        """
        if whole:
            self.records += 1
            self._seen += whole
            a, b = weight * part, weight * whole
            for i, value in enumerate((a, b, a * a, a * b, b * b)):
                self._sums[i] += value

    @property
    def rate(self) -> float:
        """Ratio of the sums; 0 without requests."""
        return acceptance_rate(self._sums[0], self._sums[1])

    @property
    def error(self) -> float:
        """Standard error of the rate.

        It is infinite below two requests, and never below the standard error for independent tokens.
        """
        part, whole, part2, cross, whole2 = self._sums
        if self.records < 2:
            return math.inf
        rate = self.rate
        spread = max(part2 - 2 * rate * cross + rate * rate * whole2, 0.0) * self.records / (self.records - 1)
        smoothed = (part + 0.5) / (whole + 1)
        return math.sqrt(max(spread / whole**2, smoothed * (1 - smoothed) / self._seen))


@dataclass(frozen=True)
class Evidence:
    """Draft tokens of one version that were verified.

    Attributes:
        version: the version that drafted.
        accepted: accepted draft tokens.
        tested: draft tokens that verification reached.
        tokens: generated tokens.
        weight: the number of equal samples that this sample represents, where not all traffic was kept.
    """

    version: int
    accepted: int
    tested: int
    tokens: int
    weight: float = 1.0

    @classmethod
    def of(cls, trace: Trace) -> Evidence:
        """Return the evidence of a request."""
        accepted, tested = tested_tokens(trace)
        return cls(trace.drafter_version, accepted, tested, trace.verdict.shape[0], trace.weight)


@dataclass
class Arm:
    """Live figures of one version.

    Attributes:
        tested: accepted draft tokens / tested draft tokens.
        speed: accepted draft tokens / generated tokens, which is 1 - decoding steps / generated tokens. A step takes
            the same time with every drafter of one kind and size, so versions compare as their tokens per second do.
    """

    tested: Ratio = field(default_factory=Ratio)
    speed: Ratio = field(default_factory=Ratio)

    def add(self, evidence: Evidence) -> None:
        """Count a sample; ignore one without draft tokens."""
        if evidence.tested:
            self.tested.add(evidence.accepted, evidence.tested, evidence.weight)
            self.speed.add(evidence.accepted, evidence.tokens, evidence.weight)


@dataclass(frozen=True)
class Judgement:
    """Decision on a canary, with the reason in one line."""

    action: Literal["watch", "promote", "roll_back"]
    reason: str


class CanaryTrial:
    """Comparison of a canary with the stable version, which may be evaluated after every request.

    Confidence sequences bound the differences: with a probability of at least 1 - ``risk`` each bound holds at all
    times at once (Robbins' normal mixture, 1970). So repeated evaluation does not raise the error rate.

    The canary is always rolled back when its acceptance rate is certainly below half of the gate's rate: its weights
    are corrupt. Where replicas of the own engine measure the effect, with both versions in random short blocks, the
    canary is

    * rolled back when it is certainly slower;
    * promoted when it is certainly not slower by more than ``margin``;
    * at the time limit, promoted when it is faster on average, and rolled back otherwise.

    Elsewhere the canary is

    * rolled back when its acceptance rate, or its accepted tokens per token, is certainly below the stable version's;
    * promoted when both are certainly not lower by more than ``margin``;
    * rolled back when the time limit passes without a decision.

    Attributes:
        version: the number of the canary.
        stable: the number of the stable version.
        measured: the measured effect of the canary; None where no replica measures it.
    """

    def __init__(
        self, version: int, stable: int, expected: float, ends: float, margin: float = 0.02, risk: float = 0.05
    ) -> None:
        """Start a trial without evidence.

        Args:
            version: the number of the canary.
            stable: the number of the stable version.
            expected: the acceptance rate that the gate measured.
            ends: the time limit, in seconds of the monotonic clock.
            margin: the loss of speed or acceptance that a promotion tolerates.
            risk: the error probability of all bounds together.
        """
        self.version, self.stable = version, stable
        self._expected, self._ends = expected, ends
        self._margin, self._risk = margin, risk
        self._arms = {version: Arm(), stable: Arm()}
        self.measured: Measured | None = None

    def add(self, trace: Trace) -> None:
        """Count a live request; ignore requests of other versions."""
        self.count(Evidence.of(trace))

    def count(self, evidence: Evidence) -> None:
        """Count evidence that has no trace; ignore evidence on other versions."""
        if (arm := self._arms.get(evidence.version)) is not None:
            arm.add(evidence)

    def is_late(self, now: float) -> bool:
        """Return whether the trial has to end at the monotonic time ``now``."""
        return now >= self._ends

    def judge(self, now: float) -> Judgement:
        """Return the decision at the monotonic time ``now``."""
        new, old = self._arms[self.version], self._arms[self.stable]
        late = self.is_late(now)
        if new.tested.records >= FEWEST_RECORDS:
            width = self._width(new.tested.error)
            if new.tested.rate + width < CORRUPT_SHARE * self._expected:
                reason = f"live acceptance {new.tested.rate:.3f} is far below the gate's {self._expected:.3f}"
                return Judgement("roll_back", reason)
        if self.measured is not None:
            return self._judge_effect(self.measured.effect, late)
        if min(new.tested.records, old.tested.records) >= FEWEST_RECORDS:
            bounds = []
            for name, canary, stable in (("acceptance", new.tested, old.tested), ("speed", new.speed, old.speed)):
                difference = canary.rate - stable.rate
                width = self._width(math.hypot(canary.error, stable.error))
                bounds.append(difference - width)
                if difference + width < 0:
                    return Judgement("roll_back", f"live {name} fell from {stable.rate:.3f} to {canary.rate:.3f}")
            if min(bounds) > -self._margin:
                reason = f"live acceptance {old.tested.rate:.3f} -> {new.tested.rate:.3f}"
                return Judgement("promote", reason)
        if late:
            return Judgement("roll_back", f"undecided at its time limit, after {new.tested.records} requests")
        return Judgement("watch", "not clear yet")

    def _judge_effect(self, effect: Effect | None, late: bool) -> Judgement:
        """Return the decision by the measured effect."""
        pairs = 0 if effect is None else effect.trials
        if effect is None or pairs < LEAST_TRIALS:
            undecided = Judgement("roll_back", f"undecided at its time limit, after {pairs} pairs of blocks")
            return undecided if late else Judgement("watch", "not clear yet")
        comparison = f"speed {effect.percent} against version {self.stable}"
        if effect.log + effect.width < 0:
            return Judgement("roll_back", f"slower: {comparison}")
        if effect.log - effect.width > -self._margin:
            return Judgement("promote", comparison)
        if late:
            action = "promote" if effect.log > 0 else "roll_back"
            return Judgement(action, f"at its time limit: {comparison}")
        return Judgement("watch", comparison)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the trial as JSON, for the status and for events."""
        new, old = self._arms[self.version], self._arms[self.stable]
        return {
            **speed_figures(None if self.measured is None else self.measured.effect),
            "canary": self.version,
            "requests": new.tested.records,
            "acceptance": round(new.tested.rate, 4),
            "gate_acceptance": round(self._expected, 4),
            "baseline_requests": old.tested.records,
            "baseline_acceptance": round(old.tested.rate, 4),
        }

    def _width(self, error: float) -> float:
        """Return half the width of the confidence sequence for a mean with the standard error ``error``."""
        if not math.isfinite(error):
            return math.inf
        return sequence_width(error, self._risk / 2, _EFFECT)  # each of the two compared rates gets half of the risk


def speed_figures(effect: Effect | None) -> dict[str, Any]:
    """Return the measured effect of a version as JSON, for the status and for events; nothing before it is known."""
    if effect is None:
        return {}
    figures: dict[str, Any] = {"pairs": effect.trials, "speed": round(math.exp(effect.log), 4)}
    if math.isfinite(effect.width):
        figures["speed_low"], figures["speed_high"] = (round(bound, 4) for bound in effect.interval)
    return figures


def expected_rate(per_depth: list[float]) -> float:
    """Return accepted / tested tokens of a full chain, given the gate's acceptance at each depth; 0 without depths.

    A token is tested when all tokens before it were accepted, so live traffic tests fewer deep tokens than shallow
    ones.
    """
    reached, accepted, tested = 1.0, 0.0, 0.0
    for alpha in per_depth:
        tested += reached
        reached *= alpha
        accepted += reached
    return acceptance_rate(accepted, tested)


class Upstreams:
    """Reader of the counts that upstream servers report for a domain, once a second.

    The difference of two reports belongs to the version of both. It is dropped when the version changed in between, and
    where traces of the same drafts arrive, as these would count twice.
    """

    def __init__(self, loads: ReplicaLoads, domain: str) -> None:
        self._loads, self._domain = loads, domain
        self._before: dict[str, UpstreamReport] = {}
        self._next = 0.0

    @property
    def traced(self) -> bool:
        """Whether traces of an upstream server arrive."""
        return any(report.traced for report in self._before.values())

    def new(self) -> list[Evidence]:
        """Return the evidence since the previous call; nothing while Redis is down."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _UPSTREAM_SECONDS
        try:
            now = {name: report for name, report in self._loads.upstreams().items() if report.domain == self._domain}
        except RedisError as error:
            logger.debug("the reports of upstreams cannot be read: %s", error)
            return []
        evidence = list(self._since(now))
        self._before = now
        return evidence

    def _since(self, now: dict[str, UpstreamReport]) -> Iterator[Evidence]:
        for name, report in now.items():
            before = self._before.get(name)
            if before is None or before.version != report.version or report.rounds < before.rounds:
                continue  # a new server, another version, or a restarted server
            if report.traced or before.traced:
                continue
            rounds, accepted = report.rounds - before.rounds, report.accepted - before.accepted
            if rounds:
                yield Evidence(report.version, accepted, _tested(report) - _tested(before), rounds + accepted)


def _tested(report: UpstreamReport) -> int:
    """Return the tested draft tokens: the first of each step, and each token after an accepted token.

    Assumes that all drafts are as long as the longest draft.
    """
    last = report.accepted_per_position[-1] if report.accepted_per_position else 0
    return report.rounds + report.accepted - last


class MeasuredEffects:
    """Reader of the effects that replicas of the own engine measure in a domain, once a second."""

    def __init__(self, loads: ReplicaLoads, domain: str) -> None:
        self._loads, self._domain = loads, domain
        self._next = 0.0
        self._comparisons: list[Comparison] = []

    def of(self, candidate: int, stable: int) -> Measured | None:
        """Return the effect of a candidate against the stable version, summed over replicas; None without any."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _UPSTREAM_SECONDS
            try:
                domains = [effects.get(self._domain) for effects in self._loads.effects().values()]
            except RedisError as error:
                logger.debug("the measured effects of versions cannot be read: %s", error)
            else:
                self._comparisons = [
                    comparison for report in domains if report is not None for comparison in report.comparisons
                ]
        pair = (candidate, stable)
        effects = [
            comparison.measured for comparison in self._comparisons if (comparison.candidate, comparison.stable) == pair
        ]
        return sum(effects[1:], effects[0]) if effects else None
