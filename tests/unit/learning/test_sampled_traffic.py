"""Estimates from a sample of the traffic that was chosen by worth are those of all of it; without weights none is."""

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
EASY, HARD = 1, 2  # prompt tokens that say which kind of record it is
BASE = make_trace(completion=TOKENS, hidden=False)


@dataclass(frozen=True)
class Traffic:
    """All records and the sample that was kept; ``acceptance`` of all, and what ``share`` of them is easy."""

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
    """A tenth of the bytes is kept, by how much of a record no draft gave."""
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


def check(what: str, said: float, true: float, error: float, weights: bool) -> None:
    """Within four standard errors of what is true of all records with weights, and far from it without."""
    off = (said - true) / error
    print(f"{what}: {said:.4f}, of all {true:.4f}, {off:+.1f} standard errors")
    assert bool(abs(off) < 4) is weights


def spread(traces: list[Trace], true: float) -> float:
    """The standard error of an acceptance rate over kept records: of a ratio, each record with its weight."""
    counts = np.array([(*drift.tested_tokens(trace), trace.weight) for trace in traces])
    left = counts[:, 2] * (counts[:, 0] - true * counts[:, 1])
    return float(np.sqrt((left**2).sum()) / (counts[:, 2] * counts[:, 1]).sum())


@weighted
def test_the_acceptance_of_live_requests(traffic: Traffic, weights: bool):
    true, ratio = traffic.acceptance(traffic.offered), Ratio()
    for trace in sample_of(traffic, weights):
        ratio.add(*drift.tested_tokens(trace), trace.weight)
    check("canary", ratio.rate, true, ratio.error, weights)
    if weights:
        assert ratio.error == pytest.approx(spread(traffic.kept, true), rel=0.05), "and it knows how far it may be off"


@weighted
def test_the_level_that_drift_is_measured_from(traffic: Traffic, weights: bool, monkeypatch):
    monkeypatch.setattr("osd.learning.drift._WARM_RECORDS", 500)
    true, test = traffic.acceptance(traffic.offered), Cusum(0.1, 1000)
    used = sample_of(traffic, weights)[:500]
    for trace in used:
        test.add(*drift.tested_tokens(trace), trace.weight)
    check("drift", test.level, true, spread(used, true), weights)


def test_drift_of_sampled_traffic_is_found_and_no_more_often_said_than_promised(traffic: Traffic):
    calm, chance = Cusum(0.1, 1000), np.random.default_rng(3)
    kept = [traffic.kept[place] for place in chance.integers(len(traffic.kept), size=4000)]
    alarms = 0
    for trace in kept:
        if calm.add(*drift.tested_tokens(trace), trace.weight) is not None:
            alarms, calm = alarms + 1, Cusum(0.1, 1000)
    assert alarms <= 8, "two false alarms are 1000 records apart on average"
    fallen = Cusum(0.1, 1000)
    for trace in kept[:200]:
        fallen.add(*drift.tested_tokens(trace), trace.weight)
    hard = [trace for trace in kept[200:] if not is_easy(trace)]
    found = next(n for n, trace in enumerate(hard) if fallen.add(*drift.tested_tokens(trace), trace.weight) is not None)
    assert found < 100


class Known(Scorer):
    """A drafter that gets as much right as was accepted, or always ``even``."""

    def __init__(self, even: float | None = None):
        super().__init__(Toy(), 1, "forward_kl")
        self._even = even

    def score(self, batch):
        right = (
            (batch.verdict == ACCEPTED).double() if self._even is None else torch.full((batch.positions,), self._even)
        )
        return Scores(right.double()[:, None], right.double()[:, None], 1 - right.double())


def judged(traces: list[Trace], scorer: Scorer):
    found = Evaluation(scorer)
    for start in range(0, len(traces), 50):
        found.add(collate(traces[start : start + 50]))
    return found.figures()


@weighted
def test_the_gates_figures(traffic: Traffic, weights: bool):
    right = np.array([(trace.verdict.numpy() == ACCEPTED).mean() for trace in traffic.offered])
    used = sample_of(traffic, weights)
    figures, even = judged(used, Known()), judged(used, Known(0.6))
    decision = Gate(1, "forward_kl").decide(figures, even)
    true, error = float(right.mean()), decision.error
    check("acceptance", figures.per_depth[0], true, error, weights)
    check("divergence", figures.divergence, 1 - true, error, weights)
    if not weights:
        return
    assert decision.passed is bool(true > 0.6)
    mine = np.array([(trace.verdict.numpy() == ACCEPTED).mean() for trace in used])
    weight = np.array([trace.weight for trace in used])
    left = weight * (mine - (weight * mine).sum() / weight.sum())
    assert error == pytest.approx(float(np.sqrt((left**2).sum()) / weight.sum()), rel=1e-6)


def test_the_gates_early_end_goes_by_weighted_pairs(traffic: Traffic):
    """Of what was kept the hard records are most; of the traffic the easy ones are, where this drafter is better."""
    heaviest = max(trace.weight for trace in traffic.kept)
    tests = {weights: PairedTest() for weights in (True, False)}
    even = float(np.mean([(trace.verdict.numpy() == ACCEPTED).mean() for trace in traffic.kept])) + 0.04
    for weights, test in tests.items():
        for start in range(0, 500, 50):
            batch = collate(sample_of(traffic, weights)[start : start + 50])
            batch.heaviest = heaviest if weights else 1.0
            difference = Evaluation(Known()).add(batch) - Evaluation(Known(even)).add(batch)
            assert difference.abs().max() <= 1
            test.add(difference.tolist())
    assert (tests[True].better, tests[False].better) == ("first", "second")


@weighted
def test_what_is_drawn_from_the_replay_and_what_the_vocabulary_counts(traffic: Traffic, weights: bool):
    replay = Replay(10_000_000, held_out=0.1, anchors=0.2)
    for trace in sample_of(traffic, weights):
        replay.add(trace)
    for _ in range(400):  # each record once first
        replay.sample(200)
    drawn = Counter(is_easy(trace) for _ in range(400) for trace in replay.sample(200).traces)
    share, count = drawn[True] / drawn.total(), drawn.total()
    true = np.mean([is_easy(trace) for trace in traffic.offered])
    heaviest = max(trace.weight for trace in traffic.kept)
    mean = np.mean([trace.weight for trace in traffic.kept])
    # Of the draws themselves, and of the records that were kept.
    error = np.sqrt(true * (1 - true) * (1 / count + heaviest / mean / len(traffic.kept)))
    check("replay", share, true, error, weights)


@weighted
def test_what_stays_as_an_anchor(traffic: Traffic, weights: bool):
    replay = Replay(200_000, held_out=0.1, anchors=0.02)
    for trace in sample_of(traffic, weights):
        replay.add(trace)
    anchors = {request for request, _ in replay.known("anchors")}
    assert 100 < len(anchors) < 0.5 * len(traffic.kept)
    share = np.mean([is_easy(trace) for trace in traffic.kept if trace.request_id in anchors])
    true = np.mean([is_easy(trace) for trace in traffic.offered])
    check("anchors", share, true, np.sqrt(true * (1 - true) / len(anchors)), weights)


def test_the_vocabulary_is_counted_by_what_records_stand_for():
    replay = Replay(10_000, held_out=0.01)
    replay.add(msgspec.structs.replace(make_trace("a", hidden=False), weight=1.0))
    once = replay.token_counts(12)
    thrice = Replay(10_000, held_out=0.01)
    thrice.add(msgspec.structs.replace(make_trace("a", hidden=False), weight=3.0))
    assert thrice.token_counts(12) == pytest.approx(3 * once)
