"""Domains among trainers: each has one, nothing moves without need, and what moves goes where there is room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.assignment import CLEAR, assign, balance, weights

NAMES = st.sampled_from([f"trainer-{n}" for n in range(6)])
DOMAINS = st.sampled_from([f"domain-{n}" for n in range(24)])
WEIGHTS = st.dictionaries(DOMAINS, st.floats(0.01, 10), min_size=1)
ROOMS = st.dictionaries(NAMES, st.floats(0, 1), min_size=1)
HELD = st.dictionaries(DOMAINS, NAMES)


def fullest(trainers: dict[str, str], weight: dict[str, float], room: dict[str, float]) -> float:
    full = dict.fromkeys(room, 0.0)
    for domain, name in trainers.items():
        full[name] += weight[domain] / max(room[name], 0.01)
    return max(full.values())


@given(HELD, WEIGHTS, ROOMS)
def test_every_domain_has_one_trainer_that_lives_and_none_moves_that_has_one(held, weight, room):
    given = assign(held, weight, room)
    assert given.keys() == weight.keys()
    assert set(given.values()) <= room.keys()
    assert all(given[domain] == name for domain, name in held.items() if domain in weight and name in room)
    assert assign(given, weight, room) == given


@given(HELD, WEIGHTS, ROOMS)
def test_balancing_keeps_every_domain_never_fills_the_fullest_and_changes_nothing_the_second_time(held, weight, room):
    given = assign(held, weight, room)
    balanced = balance(given, weight, room)
    assert balanced.keys() == weight.keys()
    assert set(balanced.values()) <= room.keys()
    assert fullest(balanced, weight, room) <= fullest(given, weight, room) * (1 + 1e-9)
    assert balance(balanced, weight, room) == balanced


@given(WEIGHTS, ROOMS, st.data())
def test_when_a_trainer_goes_only_its_domains_move(weight, room, data):
    if len(room) < 2:
        return
    before = balance(assign({}, weight, room), weight, room)
    gone = data.draw(st.sampled_from(sorted(room)))
    left = {name: share for name, share in room.items() if name != gone}
    after = assign(before, weight, left)
    assert {domain for domain in weight if after[domain] != before[domain]} == {
        domain for domain, name in before.items() if name == gone
    }


@given(WEIGHTS, ROOMS)
def test_what_is_close_to_what_it_could_be_stays(weight, room):
    anew = assign({}, weight, room)
    worse = {domain: anew[domain] for domain in weight}
    best = fullest(anew, weight, room)
    for domain in sorted(weight):  # moves that make the fullest no more than a little fuller
        for name in sorted(room):
            if fullest({**worse, domain: name}, weight, room) <= 0.99 * CLEAR * best:
                worse[domain] = name
                break
    assert balance(worse, weight, room) == worse


def test_equal_domains_are_divided_equally_and_a_trainer_that_joins_gets_its_part():
    weight = weights({f"domain-{n}": 1.0 for n in range(20)})
    alone = assign({}, weight, {"a": 1.0})
    both = balance(alone, weight, {"a": 1.0, "b": 1.0})
    assert sorted(list(both.values()).count(name) for name in "ab") == [10, 10]


def test_those_that_are_worth_most_are_apart():
    nets = {f"domain-{n}": 0.0 for n in range(18)} | {"rich-1": 5.0, "rich-2": 5.0}
    given = assign({}, weights(nets), {"a": 1.0, "b": 1.0})
    assert given["rich-1"] != given["rich-2"]
    assert sorted(list(given.values()).count(name) for name in "ab") == [10, 10]


def test_who_has_a_fifth_of_the_room_has_a_fifth_of_the_domains_and_who_has_none_has_none():
    weight = weights({f"domain-{n}": None for n in range(24)})
    given = assign({}, weight, {"a": 1.0, "b": 0.2})
    assert list(given.values()).count("b") == 4
    busy = balance(given, weight, {"a": 0.0, "b": 1.0})
    assert set(busy.values()) == {"b"}
    assert set(assign({}, weight, {"a": 0.0}).values()) == {"a"}  # where there is nobody else


def test_a_domain_that_nothing_is_expected_of_yet_weighs_what_others_do_on_average():
    weight = weights({"known-1": 1.0, "known-2": 3.0, "new": None})
    assert weight["new"] == pytest.approx((weight["known-1"] + weight["known-2"]) / 2)
    assert sum(weight.values()) == pytest.approx(2)
    assert weights({"a": 0.0, "b": None}) == {"a": 1.0, "b": 1.0}


def test_without_trainers_nothing_can_be_given():
    with pytest.raises(ValueError, match=r"^there is no trainer to give a domain to$"):
        assign({}, {"a": 1.0}, {})
