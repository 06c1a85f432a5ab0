from __future__ import annotations

import pytest

from osd.simulation.simulation import search


def peak(trainers, budget):
    """Return a net gain with a single peak and an interaction of both arguments; 0 without trainers."""

    def net(count: int, bytes_: int | None) -> float:
        if not count:
            return 0.0
        rate = 64.0 if bytes_ is None else bytes_
        return 10.0 - (count - trainers) ** 2 - 0.1 * (rate - budget) ** 2 + 0.01 * (count - trainers) * (rate - budget)

    return net


@pytest.mark.parametrize("trainers", [1, 4, 16])
@pytest.mark.parametrize("budget", [64, 16, 1])
def test_search_finds_a_peak_without_trying_all_choices(trainers, budget):
    counts, budgets = [1, 2, 4, 8, 16], [None, 32, 16, 8, 4, 2, 1]
    best = search(peak(trainers, budget), counts, budgets)
    assert best.choice == (trainers, None if budget == 64 else budget)
    assert best.net == max(best.tried.values()) == 10.0
    assert len(best.tried) < len(counts) * len(budgets)


def test_search_finds_trainers_that_pay_only_with_a_budget():
    best = search(
        lambda count, budget: 0.0 if not count else 3.0 - count - (9.0 if budget is None else budget), [1, 2], [None, 1]
    )
    assert (best.choice, best.net) == ((1, 1), 1.0)


def test_search_without_gain_chooses_no_training():
    best = search(lambda count, budget: -float(count), [1, 2, 4], [None, 1])
    assert (best.choice, best.net) == ((0, None), 0.0)


def test_search_evaluates_each_choice_once():
    evaluated = []

    def net(count, budget):
        evaluated.append((count, budget))
        return -count

    search(net, [1, 2, 3], [None, 1])
    assert len(evaluated) == len(set(evaluated))
