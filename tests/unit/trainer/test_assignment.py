"""Assignment of domains to trainers: every domain has one trainer, moves are rare, and load follows capacity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.assignment import CLEAR_FACTOR, assign, balance, weights

NAMES = st.sampled_from([f"trainer-{n}" for n in range(6)])
DOMAINS = st.sampled_from([f"domain-{n}" for n in range(24)])
WEIGHTS = st.dictionaries(DOMAINS, st.floats(0.01, 10), min_size=1)
ROOMS = st.dictionaries(NAMES, st.floats(0, 1), min_size=1)
HELD = st.dictionaries(DOMAINS, NAMES)


def largest_load(trainers: dict[str, str], weight: dict[str, float], room: dict[str, float]) -> float:
    load = dict.fromkeys(room, 0.0)
    for domain, name in trainers.items():
        load[name] += weight[domain] / max(room[name], 0.01)
    return max(load.values())


@given(HELD, WEIGHTS, ROOMS)
def test_assign_gives_every_domain_one_live_trainer(held, weight, room):
    assigned = assign(held, weight, room)
    assert assigned.keys() == weight.keys()
    assert set(assigned.values()) <= room.keys()
    assert all(assigned[domain] == name for domain, name in held.items() if domain in weight and name in room)
    assert assign(assigned, weight, room) == assigned


@given(HELD, WEIGHTS, ROOMS)
def test_balance_never_raises_the_largest_load_and_is_stable(held, weight, room):
    assigned = assign(held, weight, room)
    balanced = balance(assigned, weight, room)
    assert balanced.keys() == weight.keys()
    assert set(balanced.values()) <= room.keys()
    assert largest_load(balanced, weight, room) <= largest_load(assigned, weight, room) * (1 + 1e-9)
    assert balance(balanced, weight, room) == balanced


@given(WEIGHTS, ROOMS, st.data())
def test_assign_moves_only_the_domains_of_a_lost_trainer(weight, room, data):
    if len(room) < 2:
        return
    before = balance(assign({}, weight, room), weight, room)
    lost = data.draw(st.sampled_from(sorted(room)))
    remaining = {name: share for name, share in room.items() if name != lost}
    after = assign(before, weight, remaining)
    assert {domain for domain in weight if after[domain] != before[domain]} == {
        domain for domain, name in before.items() if name == lost
    }


@given(WEIGHTS, ROOMS)
def test_balance_keeps_an_assignment_that_is_nearly_ideal(weight, room):
    ideal = assign({}, weight, room)
    worse = {domain: ideal[domain] for domain in weight}
    best = largest_load(ideal, weight, room)
    for domain in sorted(weight):  # moves that raise the largest load only a little
        for name in sorted(room):
            if largest_load({**worse, domain: name}, weight, room) <= 0.99 * CLEAR_FACTOR * best:
                worse[domain] = name
                break
    assert balance(worse, weight, room) == worse


def test_balance_gives_a_new_trainer_half_of_equal_domains():
    weight = weights({f"domain-{n}": 1.0 for n in range(20)})
    single = assign({}, weight, {"a": 1.0})
    both = balance(single, weight, {"a": 1.0, "b": 1.0})
    assert sorted(list(both.values()).count(name) for name in "ab") == [10, 10]


def test_assign_separates_the_most_valuable_domains():
    nets = {f"domain-{n}": 0.0 for n in range(18)} | {"rich-1": 5.0, "rich-2": 5.0}
    assigned = assign({}, weights(nets), {"a": 1.0, "b": 1.0})
    assert assigned["rich-1"] != assigned["rich-2"]
    assert sorted(list(assigned.values()).count(name) for name in "ab") == [10, 10]


def test_assign_divides_domains_by_capacity():
    weight = weights({f"domain-{n}": None for n in range(24)})
    assigned = assign({}, weight, {"a": 1.0, "b": 0.2})
    assert list(assigned.values()).count("b") == 4
    busy = balance(assigned, weight, {"a": 0.0, "b": 1.0})
    assert set(busy.values()) == {"b"}
    assert set(assign({}, weight, {"a": 0.0}).values()) == {"a"}  # the only trainer


def test_weight_of_a_domain_without_forecast_is_the_mean():
    weight = weights({"known-1": 1.0, "known-2": 3.0, "new": None})
    assert weight["new"] == pytest.approx((weight["known-1"] + weight["known-2"]) / 2)
    assert sum(weight.values()) == pytest.approx(2)
    assert weights({"a": 0.0, "b": None}) == {"a": 1.0, "b": 1.0}


def test_assign_without_trainers_fails():
    with pytest.raises(ValueError, match=r"^no trainer is available for the domains$"):
        assign({}, {"a": 1.0}, {})
