from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.economy.effect import LEAST_TRIALS
from osd.economy.report import Comparison, Measured
from osd.registry.lease import Lease
from osd.registry.pointer import Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.replica_loads import DomainEffects, UpstreamReport
from osd.registry.versions import Registry
from tests.clocks import Clock
from tests.unit.learning.toys import Toy
from tests.unit.trainer.test_rollout import FakeRedis
from tests.unit.trainer.traffic import PIECE, TOKENS, live
from trainer import canary as canary_module
from trainer.canary import FEWEST_RECORDS, CanaryTrial, Evidence, MeasuredEffects, Ratio, Upstreams, expected_rate
from trainer.rollout import CanaryWatch, DomainVersions


def trial(seed, old, new, expected=0.0, share=0.5, requests=600, spread=0.1):
    """Return the first decision and the number of requests until then, with a decision after every request."""
    rng = np.random.default_rng(seed)
    canary = CanaryTrial(2, 1, expected, ends=float(requests))
    for n in range(requests + 1):
        version = 2 if rng.random() < share else 1
        canary.add(live(rng, version, new if version == 2 else old, spread))
        judgement = canary.judge(float(n))
        if judgement.action != "watch":
            return judgement, n
    raise AssertionError("the time limit was missed")


@pytest.mark.parametrize(
    ("old", "new", "action", "reason"), [(0.4, 0.55, "promote", "->"), (0.55, 0.4, "roll_back", "fell")]
)
def test_clearly_different_version_is_decided_soon(old, new, action, reason):
    ends = [trial(seed, old, new) for seed in range(20)]
    lengths = [n for _, n in ends]
    print(f"{action} after {np.median(lengths)} requests, at most {max(lengths)}")
    assert all(judgement.action == action and reason in judgement.reason for judgement, _ in ends)
    assert max(lengths) < 250


def test_decisions_after_every_request_keep_the_error_rate():
    # For equal versions "worse" is wrong; for one worse by twice the margin "not worse" is. Each risk is 5 %.
    equal = [trial(seed, 0.5, 0.5, requests=250)[0] for seed in range(30)]
    false_alarms = sum("fell" in judgement.reason for judgement in equal)
    worse = [trial(seed, 0.54, 0.5, requests=250)[0] for seed in range(30)]
    false_promotions = sum(judgement.action == "promote" for judgement in worse)
    print(f"of 30 each: {false_alarms} false alarms, {false_promotions} false promotions")
    assert false_alarms <= 4
    assert false_promotions <= 4


def test_equal_version_is_promoted_with_enough_requests():
    judgement, n = trial(0, 0.5, 0.5, requests=6000, spread=0.05)
    print(f"promoted after {n} requests")
    assert judgement.action == "promote"


@pytest.mark.parametrize("measured", [False, True])
def test_corrupt_canary_is_rolled_back_without_baseline(measured):
    rng = np.random.default_rng(0)
    canary = CanaryTrial(2, 1, expected=0.6, ends=1000.0)
    if measured:
        canary.measured = measured_effect(0.0, 0.1)
    for n in range(FEWEST_RECORDS + 10):
        canary.add(live(rng, 2, 0.02))
        judgement = canary.judge(float(n))
        assert (judgement.action == "roll_back") == (n >= FEWEST_RECORDS - 1), n
        if judgement.action != "watch":
            break
    assert "far below the gate's 0.600" in judgement.reason


def test_acceptance_near_the_gate_is_no_corruption():
    for seed in range(20):
        judgement, _ = trial(seed, 0.45, 0.5, expected=0.55, requests=200)
        assert "far below" not in judgement.reason


def test_undecided_canary_is_rolled_back_at_the_limit():
    canary = CanaryTrial(2, 1, 0.5, ends=110.0)
    assert canary.judge(109.9).action == "watch"
    judgement = canary.judge(110.0)
    assert judgement.action == "roll_back"
    assert judgement.reason == "undecided at its time limit, after 0 requests"


def test_fewer_drafts_with_higher_acceptance_are_not_faster():
    # The acceptance rate rises, but accepted tokens per token fall, as drafts become shorter.
    canary = CanaryTrial(2, 1, 0.0, ends=1000.0)
    rng = np.random.default_rng(1)
    for _ in range(200):
        canary.add(live(rng, 1, 0.7))
        tested = rng.random(TOKENS) < 0.2
        verdict = np.where(tested, np.where(rng.random(TOKENS) < 0.9, ACCEPTED, REJECTED), NOT_DRAFTED)
        canary.add(msgspec.structs.replace(PIECE, drafter_version=2, verdict=Array.of(verdict.astype(np.int8))))
    judgement = canary.judge(1.0)
    assert canary.figures()["acceptance"] > canary.figures()["baseline_acceptance"]
    assert judgement.action == "roll_back"
    assert "live speed fell" in judgement.reason


def test_requests_without_drafts_are_ignored():
    canary = CanaryTrial(2, 1, 0.0, ends=1000.0)
    canary.add(PIECE)
    canary.add(live(np.random.default_rng(0), 7, 0.5))
    assert canary.figures()["requests"] == canary.figures()["baseline_requests"] == 0


def test_standard_error_matches_independent_requests():
    rng = np.random.default_rng(3)
    rates = []
    for _ in range(400):
        ratio = Ratio()
        for rate in rng.beta(4, 4, 50):
            ratio.add(int(rng.binomial(30, rate)), 30)
        rates.append((ratio.rate, ratio.error))
    spread = np.std([rate for rate, _ in rates])
    print(f"spread {spread:.4f}, mean standard error {np.mean([error for _, error in rates]):.4f}")
    assert np.mean([error for _, error in rates]) == pytest.approx(spread, rel=0.1)


def test_standard_error_of_a_zero_rate_is_not_zero():
    ratio = Ratio()
    for _ in range(20):
        ratio.add(0, 5)
    chance = 0.5 / 101
    assert ratio.error == pytest.approx((chance * (1 - chance) / 100) ** 0.5)


def test_expected_rate_counts_only_tested_tokens():
    assert expected_rate([0.5]) == 0.5
    assert expected_rate([0.8, 0.5, 0.25]) == pytest.approx((0.8 + 0.4 + 0.1) / (1 + 0.8 + 0.4))
    assert expected_rate([]) == 0.0


def measured_effect(log: float, error: float, pairs: int = 40) -> Measured:
    """Return the effect that replicas measured over 100 seconds of a canary."""
    stable = 100.0 * math.exp(log)
    return Measured(pairs, 100.0, stable, (stable * error) ** 2)


@pytest.mark.parametrize(("log", "error", "pairs", "late", "action", "reason"), [
    (-0.05, 0.01, 40, False, "roll_back", r"slower: speed -4.9% \(-7.8 to -1.9\) against version 1"),
    (0.03, 0.005, 40, False, "promote", r"speed \+3.0% \(\+1.\d to \+4.\d\) against version 1"),
    (-0.004, 0.003, 400, False, "promote", r"speed -0.4% "),
    (0.01, 0.02, 40, False, "watch", "speed"),
    (0.01, 0.02, 40, True, "promote", "at its time limit: speed"),
    (-0.01, 0.02, 40, True, "roll_back", "at its time limit: speed"),
    (-0.3, 0.001, LEAST_TRIALS - 1, False, "watch", "not clear yet"),
    (0.3, 0.001, LEAST_TRIALS - 1, True, "roll_back", "undecided at its time limit, after 11 pairs of blocks"),
])  # fmt: skip
def test_measured_effect_decides_on_a_canary(log, error, pairs, late, action, reason):
    canary = CanaryTrial(2, 1, 0.0, ends=100.0)
    canary.measured = measured_effect(log, error, pairs)
    judgement = canary.judge(100.0 if late else 0.0)
    assert judgement.action == action
    assert re.match(reason, judgement.reason)
    figures = canary.figures()
    assert (figures["pairs"], figures["speed"]) == (pairs, pytest.approx(math.exp(log), abs=1e-4))
    assert pairs < LEAST_TRIALS or figures["speed_low"] < figures["speed"] < figures["speed_high"]


def test_measured_effect_overrides_acceptance():
    rng = np.random.default_rng(0)
    canary = CanaryTrial(2, 1, 0.0, ends=1000.0)
    canary.measured = Measured()
    for _ in range(200):
        canary.add(live(rng, 1, 0.6))
        canary.add(live(rng, 2, 0.3))
    assert canary.judge(0.0).action == "watch"
    canary.measured = measured_effect(0.05, 0.005)
    assert canary.judge(0.0).action == "promote"


def test_effects_of_all_replicas_are_summed(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(canary_module, "time", clock)
    first, second = Measured(10, 10.0, 11.0, 0.1), Measured(20, 30.0, 31.0, 0.2)
    answers = [
        {
            "a": {
                "general": DomainEffects((Comparison(2, 1, first),)),
                "code": DomainEffects((Comparison(2, 1, first),)),
            },
            "b": {"general": DomainEffects((Comparison(2, 1, second),))},
            "c": {"general": DomainEffects((Comparison(3, 1, second),))},
            "d": {"general": DomainEffects(), "code": DomainEffects((Comparison(2, 1, second),))},
        },
        RedisConnectionError("gone"),
        {},
    ]
    effects = MeasuredEffects(SimpleNamespace(effects=Loads(*answers).upstreams), "general")
    both = Measured(30, 40.0, 42.0, pytest.approx(0.3), replicas=2)
    assert effects.of(2, 1) == both
    assert effects.of(2, 3) is None
    clock.sleep(1.0)
    assert effects.of(2, 1) == both, "the last effects stay while Redis is down"
    clock.sleep(1.0)
    assert effects.of(2, 1) is None


class Loads:
    """Reports of taps, one answer per call."""

    def __init__(self, *answers) -> None:
        self.answers: Iterator = iter(answers)

    def upstreams(self):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def report(version: int, rounds: int, accepted: tuple[int, ...], domain: str = "general") -> UpstreamReport:
    total = sum(accepted)
    return UpstreamReport(
        0.0, domain, version, rounds=rounds, drafted=3 * rounds, accepted=total, accepted_per_position=accepted
    )


@pytest.fixture
def evidence(monkeypatch):
    """Return the evidence from answers that come every second; a second read within the second returns nothing."""
    clock = Clock()
    monkeypatch.setattr(canary_module, "time", clock)

    def read(*answers) -> list[Evidence]:
        upstreams, evidence = Upstreams(Loads(*answers), "general"), []
        for _ in answers:
            evidence += [*upstreams.new(), *upstreams.new()]
            clock.sleep(1.0)
        return evidence

    return read


def test_evidence_belongs_to_the_version_of_both_reports(evidence):
    reports = [
        report(1, 10, (5, 2, 1)),
        report(1, 30, (15, 7, 3)),
        report(2, 40, (20, 9, 4)),
        report(2, 50, (24, 10, 4)),
    ]
    first, second = evidence(*({"a": report} for report in reports))
    assert first == Evidence(1, 17, 20 + 10 + 5, 20 + 17), "tested tokens follow only accepted tokens"
    assert second == Evidence(2, 5, 10 + 4 + 1, 10 + 5)


def test_restarted_idle_or_foreign_server_gives_no_evidence(evidence):
    assert evidence({"a": report(1, 30, (9, 3))}, {"a": report(1, 5, (2, 0))}) == []
    assert evidence({"a": report(1, 30, (9, 3), "x")}, {"a": report(1, 40, (12, 4), "x")}) == []
    assert evidence({"a": report(1, 30, (9, 3))}, {"a": report(1, 30, (9, 3))}) == []
    assert evidence({}, {"a": report(1, 30, (9, 3))}) == []


def test_redis_outage_loses_no_evidence(evidence):
    error = RedisConnectionError("gone")
    (sample,) = evidence({"a": report(1, 10, (5, 2))}, error, {"a": report(1, 30, (15, 6))})
    assert (sample.accepted, sample.version) == (14, 1)


def test_evidence_of_several_servers_is_separate(evidence):
    before = {"a": report(1, 10, (5, 2)), "b": report(2, 90, (50, 9))}
    after = {"a": report(1, 20, (9, 4)), "b": report(2, 95, (52, 9))}
    assert [(sample.version, sample.accepted) for sample in evidence(before, after)] == [(1, 6), (2, 2)]


def test_counters_of_a_traced_server_give_no_evidence(evidence):
    before, after = report(1, 10, (5, 2)), report(1, 30, (15, 6))
    traced = msgspec.structs.replace(after, traced=True)
    assert evidence({"a": before}, {"a": traced}) == [], "capture began between the reports"
    assert evidence({"a": traced}, {"a": report(1, 50, (25, 9))}) == [], "capture ended between the reports"
    (sample,) = evidence({"a": traced, "b": before}, {"a": traced, "b": after})
    assert sample.accepted == 14, "the other server is not traced"


def test_traces_of_an_upstream_arrive_while_it_reports_them():
    upstreams = Upstreams(Loads({"a": msgspec.structs.replace(report(1, 10, (5,)), traced=True)}), "general")
    assert not upstreams.traced
    upstreams.new()
    assert upstreams.traced


def seconds(version: int, chance: float, count: int) -> list[Evidence]:
    """Return the evidence of ``count`` seconds, each with 40 decoding steps that draft one token."""
    drawn = np.random.default_rng(version).binomial(40, chance, count).tolist()
    return [Evidence(version, accepted, 40, 40 + accepted) for accepted in drawn]


@pytest.mark.parametrize(
    ("chance", "action", "stable"), [(0.35, "roll_back", 1), (0.55, "promote", 2), (0.1, "roll_back", 1)]
)
@pytest.mark.parametrize("traced", [False, True])
def test_server_with_one_drafter_compares_with_the_past(tmp_path, traced, chance, action, stable):
    rng = np.random.default_rng(0)

    def drafts(version: int, chance: float) -> Iterator[Callable[[], None]]:
        for sample in seconds(version, chance, 100):
            trace = live(rng, version, chance)
            yield partial(watch.observe, trace, True) if traced else partial(watch.count, sample)

    registry = Registry(tmp_path)
    for _ in range(2):
        registry.publish("general", Toy().weights(), Toy().config(), {"gate": {"per_depth": [0.5]}})
    redis = FakeRedis(Rollout(1, 2, 0.5, 0.0))
    lease = Lease(PointerFiles(tmp_path), "general")
    watch = CanaryWatch(DomainVersions("general", registry, redis, redis, lease), 1e9)
    for draft in drafts(1, 0.5):
        draft()
    assert watch.decide(0.0) is None
    watch.follow(Rollout(1, 2, 0.5, 0.0))
    for draft in drafts(2, chance):
        draft()
        if (judgement := watch.decide(0.0)).action != "watch":
            break
    print(judgement)
    assert judgement.action == action
    assert (redis.moves[-1].stable, redis.moves[-1].canary) == (stable, None)
    assert watch.canary is None
