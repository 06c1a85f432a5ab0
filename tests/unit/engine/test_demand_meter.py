"""What is asked of an engine, and how plain decoding would fare with it, on engines that exist in seconds only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from osd.demand import WINDOW_SECONDS
from osd.economy.costs import CostModel
from osd.engine.demand_meter import DemandMeter
from osd.engine.savings import PlainRound

SLOTS = 8
COSTS = CostModel({rows: 0.007 + 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)})
REQUEST = SimpleNamespace(prompt_ids=(1,) * 100)
KEPT = 0.55  # of each drafted token, if the one before was kept


def plain_decoding(streams):
    return COSTS.plain_round(streams), 1.0


def drafting(streams):
    """Seconds of a round, and tokens of each: fewer are drafted where there are more to draft for."""
    nodes = max(5 - streams, 0)
    return COSTS.round(streams * (1 + nodes)), sum(KEPT**place for place in range(nodes + 1))


@dataclass
class Served:
    """What an engine went through, and what its meter says of it."""

    meter: DemandMeter = field(default_factory=lambda: DemandMeter(0.0, SLOTS))
    busy: float = 0.0
    said: float = 0.0
    same_streams: float = 0.0


def serve(how, arrivals, users=0, seed=0):
    """Answer requests that come at ``arrivals``, or of so many ``users`` who ask again at once, 100 tokens or so."""
    draw, it, now = random.Random(seed), Served(), 0.0  # noqa: S311 - repeatable, not secret
    lengths = [float(round(20 + draw.expovariate(1 / 80))) for _ in arrivals]
    coming = [(0.0 if users and number < users else when, number) for number, when in enumerate(arrivals)]
    coming = coming[:users] if users else coming
    asked = next_one = len(coming) if users else 0
    there: list[float] = []
    while there or coming:
        if not there:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            there.append(lengths[coming.pop(0)[1]])
            asked += not users
        began, streams = now, min(len(there), SLOTS)
        seconds, tokens = how(streams)
        now += seconds
        present = len(there)
        drawn = [min(tokens, left) for left in there[:streams]]
        there[:streams] = [left - mine for left, mine in zip(there, drawn, strict=False)]
        ended = [left <= 1e-9 for left in there[:streams]]
        there = [left for left in there if left > 1e-9]
        left = len(there)
        for _ in range(sum(ended)):
            if users and next_one < len(lengths):
                there.append(lengths[next_one])
                next_one, asked = next_one + 1, asked + 1
        each = [COSTS.plain_round(streams) / streams * mine for mine in drawn]
        came = sum(when <= now for when, _ in coming)
        it.meter.observe(
            a_round(drawn, ended), began, seconds, PlainRound(each, 0.0), present, left + came, asked + came
        )
        it.meter.look(now, COSTS)
        it.busy += seconds
        it.said += it.meter.stretch * sum(each)
        it.same_streams += sum(each)
    return it


def a_round(tokens, ended, domains=(), calls=None):
    domains = domains or ["general"] * len(tokens)
    drafters = [None if name is None else SimpleNamespace(domain=name, kind="eagle", calls=calls) for name in domains]
    sequences = [
        SimpleNamespace(
            sequence=SimpleNamespace(drafter=drafter, finish="stop" if end else None, request=REQUEST), tokens=mine
        )
        for drafter, end, mine in zip(drafters, ended, tokens, strict=True)
    ]
    return SimpleNamespace(sequences=sequences)


def poisson(rate, count, seed=1):
    draw, now, times = random.Random(seed), 0.0, []  # noqa: S311 - repeatable, not secret
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


@pytest.mark.parametrize("rate", [1.0, 3.5])
def test_independent_users_would_have_kept_plain_decoding_busy_as_long_as_the_meter_says(rate):
    arrivals = poisson(rate, 1000)
    drafted, plain = (serve(how, arrivals) for how in (drafting, plain_decoding))
    assert drafted.said == pytest.approx(plain.busy, rel=0.02)
    assert drafted.same_streams > 1.03 * plain.busy, "what is asked for matters here"


@pytest.mark.parametrize("users", [1, 3, 8])
def test_users_who_wait_would_have_kept_it_busy_with_as_many_at_once(users):
    drafted, plain = (serve(how, [0.0] * 800, users) for how in (drafting, plain_decoding))
    assert drafted.said == pytest.approx(plain.busy, rel=0.02)


@pytest.mark.parametrize("users", [0, 4])
def test_plain_decoding_is_as_fast_as_itself(users):
    plain = serve(plain_decoding, poisson(2.0, 800), users)
    assert plain.said == pytest.approx(plain.busy, rel=1e-3)


def test_the_demand_is_what_was_sent():
    it = serve(drafting, poisson(2.0, 1500))
    demand = it.meter.workloads(750.0, COSTS, 2)["general"].demand
    assert demand.answer == pytest.approx(100, rel=0.15)
    seen = {start: rate for start, to, rate in demand.arrivals if to == start + 1}
    assert seen[0] == pytest.approx(2.0, rel=0.15)
    assert seen[1] == pytest.approx(2.0, rel=0.25)


def test_a_round_belongs_to_the_domains_of_its_sequences_and_to_none_where_nobody_may_draft():
    it = DemandMeter(0.0, SLOTS)
    for number in range(100):
        tokens = [1] * 4
        mine = a_round(tokens, [True] * 4, ["a", "a", "b", None])
        it.observe(mine, 0.1 * number, 0.02, PlainRound([0.005] * 4, 0.0), 4, 0, 4 * (number + 1))
    found = it.workloads(10.0, COSTS, 3)
    assert {name: one.share for name, one in found.items()} == pytest.approx({"a": 0.1, "b": 0.05}, rel=0.02)
    assert it.workloads(10.0 + 20 * WINDOW_SECONDS, COSTS, 3).keys() <= found.keys()
    assert all(one.share < 1e-6 for one in it.workloads(10.0 + 40 * WINDOW_SECONDS, COSTS, 3).values())


def test_after_a_long_silence_what_comes_is_what_counts():
    it, number = DemandMeter(0.0, SLOTS), 0
    for begins in (0.0, 100 * WINDOW_SECONDS):
        for place in range(600):
            it.observe(a_round([10], [True]), begins + place, 0.1, PlainRound([0.1], 0.0), 1, 0, number + 1)
            number += 1
    demand = it.workloads(100 * WINDOW_SECONDS + 600, COSTS, 1)["general"].demand
    rates = {start: rate for start, _, rate in demand.arrivals}
    assert rates[0] == pytest.approx(1 / (1 + 0.1353 / 0.8647), rel=0.15), "the silence is as much as a window holds"


def test_nothing_is_said_before_the_first_answer():
    it = DemandMeter(0.0, SLOTS)
    it.observe(a_round([1], [False]), 0.0, 0.01, PlainRound([0.01], 0.0), 1, 1, 1)
    it.look(5.0, COSTS)
    assert (it.workloads(5.0, COSTS, 3), it.stretch) == ({}, 1.0)


def test_each_number_of_streams_says_what_its_rounds_cost_with_chains_of_each_length():
    costs = CostModel({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 16: 0.025})
    costs.observe_proposal("eagle", 2, 2, 0.004)
    it = DemandMeter(0.0, 2)
    it.observe(a_round([1], [True]), 0.0, 0.1, PlainRound([0.1], 0.0), 1, 0, 1)
    rounds = it.workloads(1.0, costs, 2)["general"].rounds
    assert rounds == (
        pytest.approx((0.010, 0.011 + 0.002, 0.012 + 0.004)),
        pytest.approx((0.011, 0.013 + 0.002, 0.015 + 0.004)),
    )


def test_a_token_of_an_answer_pays_for_its_share_of_what_the_drafter_reads():
    costs, it = CostModel({1: 0.010}), DemandMeter(0.0, 2)
    for missed in (0, 0, len(REQUEST.prompt_ids)):
        costs.observe_levels("eagle", ("first", "further"), [1], [0.001 + 2e-5 * missed], missed)
    for number in range(3):  # 40 tokens come before each end
        it.observe(a_round([30], [False]), 2.0 * number, 0.1, PlainRound([0.1], 0.0), 1, 1, number + 1)
        it.observe(a_round([10], [True]), 2.0 * number + 0.1, 0.1, PlainRound([0.1], 0.0), 1, 0, number + 1)
    assert it.workloads(6.0, costs, 2)["general"].reading == pytest.approx(0.002 / 40)


def test_beside_recall_it_says_what_calls_of_the_trained_drafter_cost():
    costs = CostModel({1: 0.010, 2: 0.011, 4: 0.013})
    costs.observe_proposal("chains of eagle", 1, 3, 0.003)
    costs.observe_proposal("chains of eagle", 2, 3, 0.004)
    for calls, expected in ((None, ()), ("chains of eagle", (0.003, 0.004))):
        it = DemandMeter(0.0, 2)
        it.observe(a_round([1], [True], calls=calls), 0.0, 0.1, PlainRound([0.1], 0.0), 1, 0, 1)
        assert it.workloads(1.0, costs, 3)["general"].calls == pytest.approx(expected)
