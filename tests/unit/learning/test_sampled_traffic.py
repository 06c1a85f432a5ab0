"""Estimates from a weighted sample of the traffic are unbiased; without the weights they are biased."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.budget import RecordSampler
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.learning import drift
from osd.learning.batch import collate
from osd.learning.drift import Cusum
from osd.learning.evaluation import Evaluation, Scorer, Scores
from osd.learning.gate import Gate, PairedTest
from osd.learning.replay import Replay
from tests.clocks import Clock
from tests.unit.learning.toys import Toy, make_trace
from trainer.canary import Ratio

TOKENS, RECORDS = 12, 6000
EASY, HARD = 1, 2  # prompt token that marks the kind of record
BASE = make_trace(completion=TOKENS, hidden=False)


@dataclass(frozen=True)
class Traffic:
    """All records, and the sample of them that was kept."""

    offered: list[Trace]
    kept: list[Trace]

    def acceptance(self, traces: list[Trace]) -> float:
        counts = np.array([drift.tested_tokens(trace) for trace in traces]).sum(0)
        return counts[0] / counts[1]


def draw(chance: np.random.Generator, number: int) -> Trace:
    easy = chance.random() < 0.6
    rate = chance.beta(18, 2) if easy else chance.beta(6, 14)
    tested = chance.random(TOKENS) < 0.8
    verdict = np.where(tested, np.where(chance.random(TOKENS) < rate, ACCEPTED, REJECTED), NOT_DRAFTED)
    source = np.where(tested, 0, -1).astype(np.int8)
    prompt = np.full(4, EASY if easy else HARD, np.int32)
    return msgspec.structs.replace(
        BASE, request_id=f"r{number}", prompt_ids=Array.of(prompt), verdict=Array.of(verdict.astype(np.int8)),
        sources=("toy",), source=Array.of(source), drafted=Array.of(np.where(tested, 1, -1).astype(np.int32)),
    )  # fmt: skip


def is_easy(trace: Trace) -> bool:
    return int(trace.prompt_ids.numpy()[0]) == EASY


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """Traffic with a sample of a tenth of the bytes, which prefers records with few accepted tokens."""
    chance, clock = np.random.default_rng(7), Clock()
    offered = [draw(chance, number) for number in range(RECORDS)]

    def score(trace: Trace) -> float:
        return 0.2 + 0.8 * float((trace.verdict.numpy() != ACCEPTED).mean())

    budget, kept = RecordSampler(100 * BASE.nbytes * 0.1, score, clock), []
    for trace in offered:
        clock.now += 0.01
        weight = budget.weight(trace, f"{trace.request_id} 0", trace.nbytes)
        if weight is not None:
            kept.append(msgspec.structs.replace(trace, weight=weight))
    assert 0.08 < sum(trace.nbytes for trace in kept) / sum(trace.nbytes for trace in offered) < 0.12
    return Traffic(offered, kept)


weighted = pytest.mark.parametrize("weights", [True, False], ids=["weighted", "without weights"])


def sample_of(traffic: Traffic, weights: bool) -> list[Trace]:
    return traffic.kept if weights else [msgspec.structs.replace(trace, weight=1.0) for trace in traffic.kept]


def check(name: str, estimate: float, true: float, error: float, weights: bool) -> None:
    """Assert an estimate within four standard errors of the true value with weights, and outside them without."""
    off = (estimate - true) / error
    print(f"{name}: {estimate:.4f}, of all {true:.4f}, {off:+.1f} standard errors")
    assert bool(abs(off) < 4) is weights


def spread(traces: list[Trace], true: float) -> float:
    """Return the standard error of a weighted acceptance rate over records."""
    counts = np.array([(*drift.tested_tokens(trace), trace.weight) for trace in traces])
    left = counts[:, 2] * (counts[:, 0] - true * counts[:, 1])
    return float(np.sqrt((left**2).sum()) / (counts[:, 2] * counts[:, 1]).sum())


@weighted
def test_canary_acceptance_is_unbiased(traffic: Traffic, weights: bool):
    true, ratio = traffic.acceptance(traffic.offered), Ratio()
    for trace in sample_of(traffic, weights):
        ratio.add(*drift.tested_tokens(trace), trace.weight)
    check("canary", ratio.rate, true, ratio.error, weights)
    if weights:
        assert ratio.error == pytest.approx(spread(traffic.kept, true), rel=0.05), "the reported error is right"


@weighted
def test_drift_level_is_unbiased(traffic: Traffic, weights: bool, monkeypatch):
    monkeypatch.setattr("osd.learning.drift._WARM_RECORDS", 500)
    true, test = traffic.acceptance(traffic.offered), Cusum(0.1, 1000)
    used = sample_of(traffic, weights)[:500]
    for trace in used:
        test.add(*drift.tested_tokens(trace), trace.weight)
    check("drift", test.level, true, spread(used, true), weights)


def test_drift_is_found_without_more_false_alarms(traffic: Traffic):
    test, chance = Cusum(0.1, 1000), np.random.default_rng(3)
    kept = [traffic.kept[place] for place in chance.integers(len(traffic.kept), size=4000)]
    alarms = 0
    for trace in kept:
        if test.add(*drift.tested_tokens(trace), trace.weight) is not None:
            alarms, test = alarms + 1, Cusum(0.1, 1000)
    assert alarms <= 8, "there is one false alarm per 1000 records on average"
    fallen = Cusum(0.1, 1000)
    for trace in kept[:200]:
        fallen.add(*drift.tested_tokens(trace), trace.weight)
    hard = [trace for trace in kept[200:] if not is_easy(trace)]
    delay = next(n for n, trace in enumerate(hard) if fallen.add(*drift.tested_tokens(trace), trace.weight) is not None)
    assert delay < 100


class Known(Scorer):
    """Scorer whose acceptance is the verdict, or always ``even``."""

    def __init__(self, even: float | None = None):
        super().__init__(Toy(), 1, "forward_kl")
        self._even = even

    def score(self, batch):
        right = (
            (batch.verdict == ACCEPTED).double() if self._even is None else torch.full((batch.positions,), self._even)
        )
        return Scores(right.double()[:, None], right.double()[:, None], 1 - right.double())


def figures_of(traces: list[Trace], scorer: Scorer):
    evaluation = Evaluation(scorer)
    for start in range(0, len(traces), 50):
        evaluation.add(collate(traces[start : start + 50]))
    return evaluation.figures()


@weighted
def test_gate_figures_are_unbiased(traffic: Traffic, weights: bool):
    right = np.array([(trace.verdict.numpy() == ACCEPTED).mean() for trace in traffic.offered])
    used = sample_of(traffic, weights)
    figures, even = figures_of(used, Known()), figures_of(used, Known(0.6))
    decision = Gate(1, "forward_kl").decide(figures, even)
    true, error = float(right.mean()), decision.error
    check("acceptance", figures.per_depth[0], true, error, weights)
    check("divergence", figures.divergence, 1 - true, error, weights)
    if not weights:
        return
    assert decision.passed is bool(true > 0.6)
    rates = np.array([(trace.verdict.numpy() == ACCEPTED).mean() for trace in used])
    weight = np.array([trace.weight for trace in used])
    left = weight * (rates - (weight * rates).sum() / weight.sum())
    assert error == pytest.approx(float(np.sqrt((left**2).sum()) / weight.sum()), rel=1e-6)


def test_early_gate_decision_uses_weighted_pairs(traffic: Traffic):
    # Most kept records are hard, but most of the traffic is easy, and this drafter is better on easy records.
    max_trace_weight = max(trace.weight for trace in traffic.kept)
    tests = {weights: PairedTest() for weights in (True, False)}
    even = float(np.mean([(trace.verdict.numpy() == ACCEPTED).mean() for trace in traffic.kept])) + 0.04
    for weights, test in tests.items():
        for start in range(0, 500, 50):
            batch = collate(sample_of(traffic, weights)[start : start + 50])
            batch.max_trace_weight = max_trace_weight if weights else 1.0
            difference = Evaluation(Known()).add(batch) - Evaluation(Known(even)).add(batch)
            assert difference.abs().max() <= 1
            test.add(difference.tolist())
    assert (tests[True].better, tests[False].better) == ("first", "second")


@weighted
def test_replay_samples_represent_the_traffic(traffic: Traffic, weights: bool):
    replay = Replay(10_000_000, held_out=0.1, anchors=0.2)
    for trace in sample_of(traffic, weights):
        replay.add(trace)
    for _ in range(400):  # so that no record is fresh
        replay.sample(200)
    drawn = Counter(is_easy(trace) for _ in range(400) for trace in replay.sample(200).traces)
    share, count = drawn[True] / drawn.total(), drawn.total()
    true = np.mean([is_easy(trace) for trace in traffic.offered])
    max_trace_weight = max(trace.weight for trace in traffic.kept)
    mean = np.mean([trace.weight for trace in traffic.kept])
    # Errors of the draws and of the kept records.
    error = np.sqrt(true * (1 - true) * (1 / count + max_trace_weight / mean / len(traffic.kept)))
    check("replay", share, true, error, weights)


@weighted
def test_anchors_represent_the_traffic(traffic: Traffic, weights: bool):
    replay = Replay(200_000, held_out=0.1, anchors=0.02)
    for trace in sample_of(traffic, weights):
        replay.add(trace)
    anchors = {request for request, _ in replay.record_keys("anchors")}
    assert 100 < len(anchors) < 0.5 * len(traffic.kept)
    share = np.mean([is_easy(trace) for trace in traffic.kept if trace.request_id in anchors])
    true = np.mean([is_easy(trace) for trace in traffic.offered])
    check("anchors", share, true, np.sqrt(true * (1 - true) / len(anchors)), weights)


def test_token_counts_are_weighted():
    replay = Replay(10_000, held_out=0.01)
    replay.add(msgspec.structs.replace(make_trace("a", hidden=False), weight=1.0))
    once = replay.token_counts(12)
    thrice = Replay(10_000, held_out=0.01)
    thrice.add(msgspec.structs.replace(make_trace("a", hidden=False), weight=3.0))
    assert thrice.token_counts(12) == pytest.approx(3 * once)
