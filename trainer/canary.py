"""Judgement of a canary: whether the new version is faster than the version in service, on live requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from redis.exceptions import RedisError

from osd.capture.trace import Trace
from osd.economy.effect import LEAST_TRIALS, Effect
from osd.economy.report import Comparison, Measured
from osd.learning.drift import tested_tokens
from osd.metrics import acceptance_rate
from osd.registry.replica_loads import ReplicaLoads, UpstreamReport

logger = logging.getLogger(__name__)

FEWEST_RECORDS = 12
"""Records of each version before anything is decided: a standard error of fewer is not to be trusted."""

_EFFECT = 0.05
"""Differences of about this size are what the confidence sequences are tightest for."""

_UPSTREAM_SECONDS = 1.0

CORRUPT_SHARE = 0.5
"""Live acceptance below this share of the gate's figure means that what is served is not what passed the gate."""


@dataclass
class Ratio:
    """A rate over requests, sum of parts by sum of wholes, with the standard error of independent requests."""

    records: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _seen: int = 0  # of all wholes, each once

    def add(self, part: int, whole: int, weight: float = 1.0) -> None:
        """Take in a request with ``part`` of ``whole``, which stands for ``weight`` of the traffic."""
        if whole:
            self.records += 1
            self._seen += whole
            a, b = weight * part, weight * whole
            for i, value in enumerate((a, b, a * a, a * b, b * b)):
                self._sums[i] += value

    @property
    def rate(self) -> float:
        """Part of the whole, 0 when there is nothing."""
        return acceptance_rate(self._sums[0], self._sums[1])

    @property
    def error(self) -> float:
        """Standard error of the rate, infinite below two requests; never below that of independent tokens."""
        part, whole, part2, cross, whole2 = self._sums
        if self.records < 2:
            return math.inf
        rate = self.rate
        spread = max(part2 - 2 * rate * cross + rate * rate * whole2, 0.0) * self.records / (self.records - 1)
        smoothed = (part + 0.5) / (whole + 1)
        return math.sqrt(max(spread / whole**2, smoothed * (1 - smoothed) / self._seen))


@dataclass(frozen=True)
class Evidence:
    """What decoding showed of a ``version``: ``accepted`` of ``tested`` draft tokens, in so many ``tokens``.

    Where not all traffic was kept it stands for ``weight`` times as much.
    """

    version: int
    accepted: int
    tested: int
    tokens: int
    weight: float = 1.0


@dataclass
class Arm:
    """What live requests show of one version.

    ``tested`` is accepted by tested draft tokens. ``speed`` is accepted by all tokens, which is one minus rounds per
    token: with a drafter of the same kind and size a round costs the same, and tokens per second compare as it does.
    """

    tested: Ratio = field(default_factory=Ratio)
    speed: Ratio = field(default_factory=Ratio)

    def add(self, shown: Evidence) -> None:
        """Take in a request, or what else was shown at one time; what had no draft is ignored."""
        if shown.tested:
            self.tested.add(shown.accepted, shown.tested, shown.weight)
            self.speed.add(shown.accepted, shown.tokens, shown.weight)


@dataclass(frozen=True)
class Judgement:
    """What to do with the canary now, and why, in one line."""

    action: Literal["watch", "promote", "roll_back"]
    reason: str


class Canary:
    """Comparison of a canary with the stable version, by tests that may be looked at after every request.

    Differences are bounded by confidence sequences: with probability of at least 1 - ``risk`` each bound holds at all
    times at once (Robbins' normal mixture, 1970), so that looking often does not make errors likelier.

    In any case the canary is rolled back when its acceptance is certainly below half of what the gate ``expected``:
    silent corruption. Where replicas of our own engine measure the effect, in which both versions take turns, it is

    * rolled back when it is certainly slower;
    * promoted when it is certainly not slower by more than ``margin``;
    * at the time that it ``ends``, promoted when it is faster on average, else rolled back.

    Elsewhere it is

    * rolled back when its acceptance, or its accepted tokens per token, is certainly below the stable version's;
    * promoted when both are certainly not lower by more than ``margin``;
    * rolled back when none of this is clear at the time that it ``ends``.

    Times are in seconds of the monotonic clock, which is never set.

    Attributes:
        version: the number of the canary.
        stable: the number of the version that it is compared with.
        measured: the measured effect of the canary; None where no replica measures it.
    """

    def __init__(
        self, version: int, stable: int, expected: float, ends: float, margin: float = 0.02, risk: float = 0.05
    ) -> None:
        self.version, self.stable = version, stable
        self._expected, self._ends = expected, ends
        self._margin, self._risk = margin, risk
        self._arms = {version: Arm(), stable: Arm()}
        self.measured: Measured | None = None

    def add(self, trace: Trace) -> None:
        """Take in a request; those of other versions are ignored."""
        accepted, tested = tested_tokens(trace)
        self.count(Evidence(trace.drafter_version, accepted, tested, trace.verdict.shape[0], trace.weight))

    def count(self, shown: Evidence) -> None:
        """The same of what nobody has a record of."""
        if (arm := self._arms.get(shown.version)) is not None:
            arm.add(shown)

    def judge(self, now: float) -> Judgement:
        """What the requests so far say at the time ``now``."""
        new, old = self._arms[self.version], self._arms[self.stable]
        late = now >= self._ends
        if new.tested.records >= FEWEST_RECORDS:
            width = self._width(new.tested.error)
            if new.tested.rate + width < CORRUPT_SHARE * self._expected:
                reason = f"live acceptance {new.tested.rate:.3f} is far below the gate's {self._expected:.3f}"
                return Judgement("roll_back", reason)
        if self.measured is not None:
            return self._judge_effect(self.measured.effect, late)
        if min(new.tested.records, old.tested.records) >= FEWEST_RECORDS:
            bounds = []
            for name, one, other in (("acceptance", new.tested, old.tested), ("speed", new.speed, old.speed)):
                difference = one.rate - other.rate
                width = self._width(math.hypot(one.error, other.error))
                bounds.append(difference - width)
                if difference + width < 0:
                    return Judgement("roll_back", f"live {name} fell from {other.rate:.3f} to {one.rate:.3f}")
            if min(bounds) > -self._margin:
                reason = f"live acceptance {old.tested.rate:.3f} -> {new.tested.rate:.3f}"
                return Judgement("promote", reason)
        if late:
            return Judgement("roll_back", f"undecided at its time limit, after {new.tested.records} requests")
        return Judgement("watch", "not clear yet")

    def _judge_effect(self, effect: Effect | None, late: bool) -> Judgement:
        """Judge by the measured effect."""
        pairs = 0 if effect is None else effect.trials
        if effect is None or pairs < LEAST_TRIALS:
            undecided = Judgement("roll_back", f"undecided at its time limit, after {pairs} pairs of blocks")
            return undecided if late else Judgement("watch", "not clear yet")
        shown = f"speed {effect.percent} against version {self.stable}"
        if effect.log + effect.width < 0:
            return Judgement("roll_back", f"slower: {shown}")
        if effect.log - effect.width > -self._margin:
            return Judgement("promote", shown)
        if late:
            action = "promote" if effect.log > 0 else "roll_back"
            return Judgement(action, f"at its time limit: {shown}")
        return Judgement("watch", shown)

    def figures(self) -> dict[str, Any]:
        """What is known so far as JSON, for the status and for events."""
        new, old = self._arms[self.version], self._arms[self.stable]
        effect = None if self.measured is None else self.measured.effect
        speed: dict[str, Any] = {}
        if effect is not None:
            speed = {"pairs": effect.trials, "speed": round(math.exp(effect.log), 4)}
            if math.isfinite(effect.width):
                speed["speed_low"], speed["speed_high"] = (round(bound, 4) for bound in effect.interval)
        return {
            **speed,
            "canary": self.version,
            "requests": new.tested.records,
            "acceptance": round(new.tested.rate, 4),
            "gate_acceptance": round(self._expected, 4),
            "baseline_requests": old.tested.records,
            "baseline_acceptance": round(old.tested.rate, 4),
        }

    def _width(self, error: float) -> float:
        """Half the width of a confidence sequence for a mean that is known up to ``error`` now."""
        if not math.isfinite(error):
            return math.inf
        # One half of the risk for each of the two rates that are compared.
        prior, variance = _EFFECT**2, error**2
        log_term = 2 * math.log(2 / self._risk) + math.log1p(prior / variance)
        return math.sqrt(variance * (1 + variance / prior) * log_term)


def expected_rate(per_depth: list[float]) -> float:
    """Accepted per tested token of a full chain, from the gate's acceptance at each depth, 0 without any depth.

    A token is tested when all before it were accepted: live traffic has fewer deep tests than shallow ones.
    """
    reached, accepted, tested = 1.0, 0.0, 0.0
    for alpha in per_depth:
        tested += reached
        reached *= alpha
        accepted += reached
    return acceptance_rate(accepted, tested)


class Upstreams:
    """Reads what taps report of a ``domain``, once a second.

    Counts are of the version that drafted at both ends of a second; a second in which it was changed says nothing.
    """

    def __init__(self, loads: ReplicaLoads, domain: str) -> None:
        self._loads, self._domain = loads, domain
        self._before: dict[str, UpstreamReport] = {}
        self._next = 0.0

    def new(self) -> list[Evidence]:
        """What was shown since the call before; nothing while Redis is gone."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _UPSTREAM_SECONDS
        try:
            now = {name: one for name, one in self._loads.upstreams().items() if one.domain == self._domain}
        except RedisError as error:
            logger.debug("upstreams cannot be read: %s", error)
            return []
        found = list(self._since(now))
        self._before = now
        return found

    def _since(self, now: dict[str, UpstreamReport]) -> Iterator[Evidence]:
        for name, report in now.items():
            before = self._before.get(name)
            if before is None or before.version != report.version or report.rounds < before.rounds:
                continue  # another version, or a server that was started anew
            rounds, accepted = report.rounds - before.rounds, report.accepted - before.accepted
            if rounds:
                yield Evidence(report.version, accepted, _tested(report) - _tested(before), rounds + accepted)


def _tested(report: UpstreamReport) -> int:
    """Draft tokens behind none that was rejected: one in each round, and one behind each accepted one but the last.

    Drafts are taken to be as long as the longest was.
    """
    last = report.accepted_per_position[-1] if report.accepted_per_position else 0
    return report.rounds + report.accepted - last


class MeasuredEffects:
    """Reader of the effects that replicas of our own engine measure in a ``domain``, once a second."""

    def __init__(self, loads: ReplicaLoads, domain: str) -> None:
        self._loads, self._domain = loads, domain
        self._next = 0.0
        self._known: list[Comparison] = []

    def of(self, candidate: int, stable: int) -> Measured | None:
        """Return the effect of a candidate against the stable version, of all replicas together; None without any."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _UPSTREAM_SECONDS
            try:
                domains = [effects.get(self._domain) for effects in self._loads.effects().values()]
            except RedisError as error:
                logger.debug("effects of versions cannot be read: %s", error)
            else:
                self._known = [one.comparison for one in domains if one is not None and one.comparison is not None]
        found = [one.measured for one in self._known if (one.candidate, one.stable) == (candidate, stable)]
        return sum(found[1:], found[0]) if found else None
