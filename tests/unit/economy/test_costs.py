"""What parts of a round cost, on simulated machines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate

import pytest

from osd.economy.costs import CostModel, Curve


def test_a_curve_runs_straight_between_what_was_seen_and_goes_on_beyond() -> None:
    curve = Curve({2: 10.0, 4: 20.0})
    assert [curve.at(count) for count in (1, 2, 3, 4, 64)] == [10, 10, 15, 20, 320]
    assert Curve({2: 10.0, 4: 9.0}).at(64) == 9, "more rows never cost less"
    assert Curve({2: 10.0}).at(64) == 10
    assert Curve().at(3) == 0


def test_a_curve_follows_what_is_measured_but_not_one_outlier() -> None:
    curve = Curve({4: 10.0})
    curve.observe(4, 1000.0)
    assert curve.at(4) < 13
    for _ in range(60):
        curve.observe(4, 20.0)
    assert curve.at(4) == pytest.approx(20, rel=0.01)


def test_counts_above_eight_share_buckets_and_are_told_apart_by_the_line_between_them() -> None:
    curve = Curve({16: 4.0})
    curve.observe(40, 7.0)
    curve.observe(47, 9.0)  # the same bucket: now 7.2 at 40.7 on average
    assert curve.at(41) == pytest.approx(7.2 + 0.3 * 3.2 / 24.7)
    assert curve.at(22) == pytest.approx(4 + 6 * 3.2 / 24.7)
    assert curve.at(17) < curve.at(18) < curve.at(19)


def test_a_measurement_of_no_time_says_nothing() -> None:
    costs = CostModel({1: 10.0, 4: 12.0})
    for seconds in (0.0, -1.0):
        costs.observe_host(1, seconds)
        costs.observe_forward(1, seconds)
    assert costs.round(1) == 10
    costs.observe_host(1, 2.0)
    assert costs.round(1) == pytest.approx(12, rel=1e-3)


def test_a_size_that_was_dear_once_is_not_avoided_for_ever() -> None:
    """Another process takes a core while 8 rows are tried; afterwards only small forwards are seen."""
    costs = CostModel({1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0, 16: 20.0})
    for _ in range(100):
        costs.observe_forward(8, 30.0)
        costs.observe_forward(1, 10.0)
    assert costs.forward(8) / costs.forward(1) > 1.7
    for _ in range(3000):
        costs.observe_forward(1, 10.0)
        costs.observe_forward(2, 10.5)
    assert costs.forward(8) / costs.forward(1) == pytest.approx(1.2, abs=0.04)
    for _ in range(3000):  # what is dear for good is known to be, as long as it is seen
        costs.observe_forward(1, 10.0)
        costs.observe_forward(8, 20.0)
    assert costs.forward(8) / costs.forward(1) == pytest.approx(2.0, rel=0.1)


def _machine(seed: int) -> Iterator[tuple[int, float, float]]:
    """Rounds of a machine that is sometimes slower, most of them with drafts: rows, seconds, and those of one row.

    At rest one row takes as long as four; beside drafts that are verified it takes four fifths of that.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    level, aim = 0.0, 0.0
    while True:
        aim = draw.choice([-0.3, 0.0, 0.25]) if draw.random() < 0.01 else aim
        level += 0.1 * (aim - level)
        rows = 1 if draw.random() < 0.04 else draw.choice([5, 7, 9, 12, 16])
        one, several = (math.exp(level) * seconds for seconds in (8.0, 9.5 + 0.1 * rows))
        yield rows, (one if rows == 1 else several) * math.exp(draw.gauss(0, 0.05)), one


@pytest.mark.parametrize("seed", range(3))
def test_what_a_size_costs_that_is_seen_now_and_then_is_known_within_two_percent(seed: int) -> None:
    costs = CostModel({1: 10.0, 2: 10.0, 4: 10.0, 8: 10.3, 16: 11.1, 32: 13.0})
    said = took = 0.0
    for number, (rows, seconds, one) in zip(range(8000), _machine(seed), strict=False):
        costs.observe_forward(rows, seconds)
        if rows > 1 and number >= 1500:
            said += seconds * costs.forward(1) / costs.forward(rows)
            took += one
    assert said == pytest.approx(took, rel=0.02)


def test_a_plain_round_has_what_is_beside_forwards_of_rounds_without_drafts() -> None:
    costs = CostModel({1: 10.0, 8: 12.0})
    costs.observe_host(8, 2.0)
    assert costs.plain_round(1) == pytest.approx(costs.round(1)), "until one was seen"
    for _ in range(50):
        costs.observe_host(8, 2.0)
        costs.observe_host(1, 1.5)
        costs.observe_plain_host(1, 1.0)
    assert costs.round(8) == pytest.approx(14.0, rel=0.01)
    assert costs.plain_round(1) == pytest.approx(11.0, rel=0.01)


def test_sizes_that_are_dearer_than_at_rest_make_no_others_dear_that_are_seen() -> None:
    """Many rows take twice what they took at rest, when other processes run; one row takes no longer."""
    costs = CostModel({1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0, 16: 14.0, 32: 20.0})
    for number in range(400):
        if number % 16 == 0:
            costs.observe_forward(1, 10.0)
        costs.observe_forward(32, 40.0)
    assert costs.forward(32) == pytest.approx(40.0, rel=0.05)
    assert costs.forward(1) == pytest.approx(10.0, rel=0.15)


def test_what_a_call_takes_is_known_for_each_number_of_nodes_and_looked_up_again() -> None:
    model = CostModel({1: 0.01})
    assert model.calls("a call", 3).tolist() == [0.0] * 4
    for nodes, seconds in ((1, 0.001), (4, 0.002), (20, 0.004)):
        for _ in range(16):
            model.observe_levels("eagle", ("a call",), [nodes], [seconds], 0)
    for _ in range(16):
        model.observe_forward(1, 0.01)
    known = model.calls("a call", 24).tolist()
    assert known == [0.0, *(model.call("a call", nodes) for nodes in range(1, 25))]
    faded = math.exp(-16 / 700)  # for so many rounds none was made
    assert (known[1], known[4], known[20]) == pytest.approx((0.001 * faded, 0.002 * faded, 0.004 * faded))
    for _ in range(64):
        model.observe_levels("eagle", ("a call",), [1], [0.0015], 0)
        model.observe_forward(1, 0.01)
    assert model.calls("a call", 24)[1] == pytest.approx(0.0015, rel=0.02)


def test_a_call_that_was_disturbed_once_is_not_avoided_for_ever() -> None:
    model = CostModel({1: 0.01})
    model.observe_levels("eagle", ("first", "further"), [1], [0.013], 0)
    rounds = 0
    while model.call("first", 1) > 0.001:
        model.observe_forward(1, 0.01)
        rounds += 1
    assert 100 < rounds < 2000, "seconds"
    model.observe_levels("eagle", ("first", "further"), [1], [0.0008], 0)
    assert model.call("first", 1) < 0.0025, "what was seen long ago says little"
    for _ in range(30):
        model.observe_levels("eagle", ("first", "further"), [1], [0.0008], 0)
    assert model.call("first", 1) == pytest.approx(0.0008, rel=0.1)


def test_a_call_about_fewer_nodes_is_taken_for_no_dearer_than_one_about_more() -> None:
    model = CostModel({1: 0.01})
    model.observe_levels("eagle", ("first",), [1], [0.013], 0)
    for nodes, seconds in ((3, 0.0009), (6, 0.0012)):
        model.observe_levels("eagle", ("first",), [nodes], [seconds], 0)
    found = [model.call("first", nodes) for nodes in (1, 2, 3, 5, 6, 40)]
    assert found == pytest.approx([0.0009, 0.0009, 0.0009, 0.0012, 0.0012, 0.0012])


def test_what_is_known_of_a_call_stays_though_larger_ones_were_not_made_for_long() -> None:
    model = CostModel({1: 0.01})
    model.observe_levels("eagle", ("first",), [4], [0.0011], 0)
    for _ in range(3000):
        model.observe_levels("eagle", ("first",), [1], [0.0008], 0)
        model.observe_forward(1, 0.01)
    assert model.call("first", 1) == pytest.approx(0.0008, rel=0.01)
    assert model.call("first", 4) < 0.0001, "nobody knows"


def test_where_calls_are_made_all_along_their_cost_is_a_running_mean() -> None:
    model = CostModel({1: 0.01})
    for number in range(400):
        model.observe_levels("eagle", ("first",), [1], [0.002 if number % 2 else 0.001], 0)
        model.observe_forward(1, 0.01)
    assert model.call("first", 1) == pytest.approx(0.0015, rel=0.1)


def test_a_chain_of_a_drafter_that_is_asked_level_by_level_takes_its_calls() -> None:
    names, model = ("first", "further", "further"), CostModel({1: 0.01})
    assert not model.by_levels("eagle")
    model.observe_levels("eagle", names, [2], [0.009], missed=0)
    assert model.proposal("eagle", 2, 3) == pytest.approx(3 * 0.009), "nobody knows what a further one takes"
    for _ in range(200):
        model.observe_levels("eagle", names, [2, 2, 1, 1], [0.001, 0.0002, 0.0001, 0.0001], missed=0)
    chains = [model.proposal("eagle", 2, nodes) for nodes in range(5)]
    assert chains == pytest.approx([0.0, 0.001, 0.0012, 0.0014, 0.0016])
    assert model.proposal("eagle", 1, 2) == pytest.approx(0.0011), "the first was asked about two at once alone"
    assert model.by_levels("eagle")
    again = CostModel.of(model.table())
    assert [again.proposal("eagle", 2, nodes) for nodes in range(5)] == pytest.approx(chains)


def test_what_a_drafter_reads_before_its_first_level_is_no_part_of_a_chain() -> None:
    model = CostModel({1: 0.01})
    for missed in (0, 0, 300, 0):
        model.observe_levels("eagle", ("first", "further"), [1, 1], [0.001 + missed * 1e-5, 0.0002], missed)
    assert model.proposal("eagle", 1, 2) == pytest.approx(0.0012)
    assert model.reading("eagle", 300) == pytest.approx(0.003)
    assert model.reading("medusa", 300) == 0.0


@pytest.mark.parametrize("hosts", [[], [3], [1, 5, 30]])
def test_many_sizes_at_once_cost_what_each_does(hosts: list[int]) -> None:
    costs, generator = CostModel({1: 0.010, 8: 0.011, 20: 0.015, 64: 0.030}), random.Random(4)  # noqa: S311
    for _ in range(40):
        costs.observe_forward(generator.randrange(1, 50), generator.uniform(0.01, 0.02))
    for rows in hosts:
        costs.observe_host(rows, 0.001 * rows)
    each = [costs.round(max(rows, 1)) for rows in range(600)]
    assert costs.rounds(599).tolist() == pytest.approx(list(accumulate(each, max)))
