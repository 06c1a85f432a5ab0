"""Costs of the parts of a step, on simulated machines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate

import pytest

from osd.economy.costs import CostModel, Curve


def test_curve_is_linear_between_and_beyond_measurements() -> None:
    curve = Curve({2: 10.0, 4: 20.0})
    assert [curve.at(count) for count in (1, 2, 3, 4, 64)] == [10, 10, 15, 20, 320]
    assert Curve({2: 10.0, 4: 9.0}).at(64) == 9, "more rows never cost less"
    assert Curve({2: 10.0}).at(64) == 10
    assert Curve().at(3) == 0


def test_curve_follows_measurements_but_no_outlier() -> None:
    curve = Curve({4: 10.0})
    curve.observe(4, 1000.0)
    assert curve.at(4) < 13
    for _ in range(60):
        curve.observe(4, 20.0)
    assert curve.at(4) == pytest.approx(20, rel=0.01)


def test_counts_above_eight_share_buckets_with_lines_between() -> None:
    curve = Curve({16: 4.0})
    curve.observe(40, 7.0)
    curve.observe(47, 9.0)  # the same bucket: now 7.2 at 40.7 on average
    assert curve.at(41) == pytest.approx(7.2 + 0.3 * 3.2 / 24.7)
    assert curve.at(22) == pytest.approx(4 + 6 * 3.2 / 24.7)
    assert curve.at(17) < curve.at(18) < curve.at(19)


def test_measurement_of_zero_seconds_is_ignored() -> None:
    costs = CostModel({1: 10.0, 4: 12.0})
    for seconds in (0.0, -1.0):
        costs.observe_host(1, seconds)
        costs.observe_forward(1, seconds)
    assert costs.step(1) == 10
    costs.observe_host(1, 2.0)
    assert costs.step(1) == pytest.approx(12, rel=1e-3)


def test_slower_machine_slows_all_sizes() -> None:
    costs = CostModel({1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0, 16: 25.0})
    for _ in range(100):
        costs.observe_forward(8, 34.0)
    assert costs.forward(1) == pytest.approx(20.0, rel=0.1)
    for _ in range(5):
        costs.observe_forward(1, 20.0)
    assert costs.forward(1) == pytest.approx(20.0, rel=0.03)


def test_size_that_was_slow_once_is_used_again() -> None:
    """Another process uses a core while 8 rows are measured; later only small forwards are measured."""
    costs = CostModel({1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0, 16: 20.0})
    for _ in range(100):
        costs.observe_forward(8, 30.0)
        costs.observe_forward(1, 10.0)
    assert costs.forward(8) / costs.forward(1) > 1.7
    for _ in range(3000):
        costs.observe_forward(1, 10.0)
        costs.observe_forward(2, 10.5)
    assert costs.forward(8) / costs.forward(1) == pytest.approx(1.2, abs=0.04)
    for _ in range(3000):  # a permanent cost stays known while it is measured
        costs.observe_forward(1, 10.0)
        costs.observe_forward(8, 20.0)
    assert costs.forward(8) / costs.forward(1) == pytest.approx(2.0, rel=0.1)


def _machine(seed: int) -> Iterator[tuple[int, float, float]]:
    """Steps of a machine that is sometimes slower, most with drafts: rows, seconds, and seconds of a single row.

    On an idle machine 1 row takes as long as 4 rows. Between steps with drafts it takes four fifths of that.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    level, aim = 0.0, 0.0
    while True:
        aim = draw.choice([-0.3, 0.0, 0.25]) if draw.random() < 0.01 else aim
        level += 0.1 * (aim - level)
        rows = 1 if draw.random() < 0.04 else draw.choice([5, 7, 9, 12, 16])
        single, several = (math.exp(level) * seconds for seconds in (8.0, 9.5 + 0.1 * rows))
        yield rows, (single if rows == 1 else several) * math.exp(draw.gauss(0, 0.05)), single


@pytest.mark.parametrize("seed", range(3))
def test_cost_of_a_rare_size_is_within_two_percent(seed: int) -> None:
    costs = CostModel({1: 10.0, 2: 10.0, 4: 10.0, 8: 10.3, 16: 11.1, 32: 13.0})
    scaled = took = 0.0
    for number, (rows, seconds, single) in zip(range(8000), _machine(seed), strict=False):
        costs.observe_forward(rows, seconds)
        if rows > 1 and number >= 1500:
            scaled += seconds * costs.forward(1) / costs.forward(rows)
            took += single
    assert scaled == pytest.approx(took, rel=0.02)


def test_plain_step_has_the_host_work_of_plain_steps() -> None:
    costs = CostModel({1: 10.0, 8: 12.0})
    costs.observe_host(8, 2.0)
    assert costs.plain_step(1) == pytest.approx(costs.step(1)), "before a plain step was measured"
    for _ in range(50):
        costs.observe_host(8, 2.0)
        costs.observe_host(1, 1.5)
        costs.observe_plain_host(1, 1.0)
    assert costs.step(8) == pytest.approx(14.0, rel=0.01)
    assert costs.plain_step(1) == pytest.approx(11.0, rel=0.01)


def test_outlier_is_bounded_where_the_forward_is_known() -> None:
    costs = CostModel({1: 1.0})
    costs.observe_host(1, 0.5)
    assert costs.without_outlier(4.0, 1, 0.0) == 4.0
    assert costs.without_outlier(40.0, 1, 0.0) == pytest.approx(4.5)
    assert costs.without_outlier(40.0, 1, 30.0) == pytest.approx(34.5), "the draft counts as it is"
    assert CostModel().without_outlier(40.0, 1, 0.0) == 40.0


def test_slow_size_does_not_change_other_measured_sizes() -> None:
    """With other processes, many rows take twice their idle time; 1 row takes no longer."""
    costs = CostModel({1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0, 16: 14.0, 32: 20.0})
    for number in range(400):
        if number % 16 == 0:
            costs.observe_forward(1, 10.0)
        costs.observe_forward(32, 40.0)
    assert costs.forward(32) == pytest.approx(40.0, rel=0.05)
    assert costs.forward(1) == pytest.approx(10.0, rel=0.15)


def test_cost_of_a_call_depends_on_its_nodes() -> None:
    model = CostModel({1: 0.01})
    assert model.calls("a call", 3).tolist() == [0.0] * 4
    for nodes, seconds in ((1, 0.001), (4, 0.002), (20, 0.004)):
        for _ in range(16):
            model.observe_levels("eagle", ("a call",), [nodes], [seconds], 0)
    for _ in range(16):
        model.observe_forward(1, 0.01)
    known = model.calls("a call", 24).tolist()
    assert known == [0.0, *(model.call("a call", nodes) for nodes in range(1, 25))]
    faded = math.exp(-16 / 700)  # after 16 steps without a call
    assert (known[1], known[4], known[20]) == pytest.approx((0.001 * faded, 0.002 * faded, 0.004 * faded))
    for _ in range(64):
        model.observe_levels("eagle", ("a call",), [1], [0.0015], 0)
        model.observe_forward(1, 0.01)
    assert model.calls("a call", 24)[1] == pytest.approx(0.0015, rel=0.02)


def test_call_that_was_slow_once_is_made_again() -> None:
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


def test_call_with_fewer_nodes_is_not_more_expensive() -> None:
    model = CostModel({1: 0.01})
    model.observe_levels("eagle", ("first",), [1], [0.013], 0)
    for nodes, seconds in ((3, 0.0009), (6, 0.0012)):
        model.observe_levels("eagle", ("first",), [nodes], [seconds], 0)
    seconds_of_calls = [model.call("first", nodes) for nodes in (1, 2, 3, 5, 6, 40)]
    assert seconds_of_calls == pytest.approx([0.0009, 0.0009, 0.0009, 0.0012, 0.0012, 0.0012])


def test_cost_of_a_call_stays_without_larger_calls() -> None:
    model = CostModel({1: 0.01})
    model.observe_levels("eagle", ("first",), [4], [0.0011], 0)
    for _ in range(3000):
        model.observe_levels("eagle", ("first",), [1], [0.0008], 0)
        model.observe_forward(1, 0.01)
    assert model.call("first", 1) == pytest.approx(0.0008, rel=0.01)
    assert model.call("first", 4) < 0.0001, "nobody knows"


def test_cost_of_regular_calls_is_a_running_mean() -> None:
    model = CostModel({1: 0.01})
    for number in range(400):
        model.observe_levels("eagle", ("first",), [1], [0.002 if number % 2 else 0.001], 0)
        model.observe_forward(1, 0.01)
    assert model.call("first", 1) == pytest.approx(0.0015, rel=0.1)


def test_chain_costs_the_calls_of_its_levels() -> None:
    names, model = ("first", "further", "further"), CostModel({1: 0.01})
    assert not model.by_levels("eagle")
    model.observe_levels("eagle", names, [2], [0.009], missed=0)
    assert model.proposal("eagle", 2, 3) == pytest.approx(3 * 0.009), "further calls were never measured"
    for _ in range(200):
        model.observe_levels("eagle", names, [2, 2, 1, 1], [0.001, 0.0002, 0.0001, 0.0001], missed=0)
    chains = [model.proposal("eagle", 2, nodes) for nodes in range(5)]
    assert chains == pytest.approx([0.0, 0.001, 0.0012, 0.0014, 0.0016])
    assert model.proposal("eagle", 1, 2) == pytest.approx(0.0011), "only the first call had two nodes"
    assert model.by_levels("eagle")
    again = CostModel.of(model.table())
    assert [again.proposal("eagle", 2, nodes) for nodes in range(5)] == pytest.approx(chains)


def test_reading_is_not_part_of_the_cost_of_a_chain() -> None:
    model = CostModel({1: 0.01})
    for missed in (0, 0, 300, 0):
        model.observe_levels("eagle", ("first", "further"), [1, 1], [0.001 + missed * 1e-5, 0.0002], missed)
    assert model.proposal("eagle", 1, 2) == pytest.approx(0.0012)
    assert model.reading("eagle", 300) == pytest.approx(0.003)
    assert model.reading("medusa", 300) == 0.0


@pytest.mark.parametrize("hosts", [[], [3], [1, 5, 30]])
def test_costs_of_many_sizes_equal_the_single_costs(hosts: list[int]) -> None:
    costs, generator = CostModel({1: 0.010, 8: 0.011, 20: 0.015, 64: 0.030}), random.Random(4)  # noqa: S311
    for _ in range(40):
        costs.observe_forward(generator.randrange(1, 50), generator.uniform(0.01, 0.02))
    for rows in hosts:
        costs.observe_host(rows, 0.001 * rows)
    each = [costs.step(max(rows, 1)) for rows in range(600)]
    assert costs.steps(599).tolist() == pytest.approx(list(accumulate(each, max)))
