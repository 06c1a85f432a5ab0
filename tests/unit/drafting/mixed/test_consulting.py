"""A trained drafter is asked where what it adds is worth more than its time, and hardly anywhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from osd.drafting.mixed.consulting import Candidate, Consulting
from osd.drafting.worth import Worth
from osd.economy.costs import CostModel

FORWARD = 0.010


def costs(call: float) -> CostModel:
    """A call takes ``call`` seconds for each token that is drafted, and a tenth more for each further sequence."""
    model = CostModel({1: FORWARD, 64: FORWARD})
    for levels in (1, 2, 3):
        for sequences in (1, 2, 3, 4):
            model.observe_proposal("eagle", sequences, levels, call * levels * (0.9 + 0.1 * sequences))
    return model


def worth(model: CostModel, sequences: int = 1) -> Worth:
    return Worth(float(sequences), sequences, np.full(40, FORWARD), None, model, sequences)


def of(sure: float, missed: int = 0, left: int = 200, asked: bool = True) -> list[Candidate]:
    return [Candidate(sure, missed, left, asked)]


def asked(consulting: Consulting, rounds: int, gain: float, model: CostModel, sure: float = 0.3) -> list[int]:
    """The levels that it was asked for in each round, when each call brings ``gain`` tokens."""
    levels = []
    for _ in range(rounds):
        found = consulting.decide(of(sure), worth(model), "eagle")
        levels.append(found.levels if found.members else 0)
        if found.members:
            consulting.observe([sure], [gain * found.levels / 3], [found.levels])
    return levels


def test_it_is_asked_as_long_as_a_call_brings_more_than_it_takes() -> None:
    model = costs(0.0005)  # three tokens take .15 of a forward, and so cost .15 tokens
    assert all(asked(Consulting(3), 300, 0.3, model)[-200:])
    late = asked(Consulting(3), 1300, 0.05, model)[-1000:]
    assert sum(map(bool, late)) <= 1000 * 0.005 / 0.15 + 1  # what probes may take


def test_a_call_that_costs_nothing_yet_is_tried() -> None:
    assert asked(Consulting(3), 1, 0.0, CostModel({1: FORWARD, 64: FORWARD})) == [3]


def test_only_the_sequences_that_recall_is_unsure_about_are_asked_for() -> None:
    model, consulting = costs(0.001), Consulting(3)
    for _ in range(100):
        for sure, gain in ((0.15, 0.8), (0.95, 0.0)):
            for levels in (1, 2, 3):
                consulting.observe([sure], [gain], [levels])
    found = consulting.decide([*of(0.95), *of(0.15)] * 2, worth(model, 4), "eagle")
    assert found.members == [1, 3]
    assert found.levels == 1  # further tokens brought nothing more


def test_a_prompt_is_not_read_for_the_last_tokens_of_a_request() -> None:
    model, consulting = costs(0.0005), Consulting(3)
    model.observe_proposal("eagle", 1, 3, 0.05, missed=500)
    for _ in range(100):
        for levels in (1, 2, 3):
            consulting.observe([0.3], [0.4], [levels])
    assert consulting.decide(of(0.3, 500, 1000), worth(model), "eagle").members == [0]
    consulting.decide(of(0.3, 500, 3), worth(model), "eagle")  # may be a probe
    assert consulting.decide(of(0.3, 500, 3), worth(model), "eagle").members == []


def test_a_prompt_is_not_read_where_hardly_any_round_asks() -> None:
    """Recall is sure of most of the text, so that reading pays by few calls."""
    model, consulting = costs(0.0005), Consulting(3)
    model.observe_proposal("eagle", 1, 3, 0.05, missed=500)
    for _ in range(100):
        for levels in (1, 2, 3):
            consulting.observe([0.3], [0.4], [levels])
            consulting.observe([0.95], [0.0], [levels])
    prompt = of(0.3, 500, 200, asked=False)
    assert consulting.decide(prompt, worth(model), "eagle").members == [0]
    for _ in range(200):
        consulting.decide(of(0.95), worth(model), "eagle")
    assert consulting.decide(prompt, worth(model), "eagle").members == []
    for _ in range(200):
        consulting.decide(of(0.3), worth(model), "eagle")
    assert consulting.decide(prompt, worth(model), "eagle").members == [0]


def usually(worth: Worth) -> Consulting:
    """One that has seen many rounds like this one."""
    consulting = Consulting(3)
    for _ in range(1000):
        consulting.decide([], worth, "eagle")
    return consulting


def test_a_second_is_worth_what_lies_between_this_round_and_the_usual_ones() -> None:
    model = costs(0.0005)
    plain, long = worth(model), worth(model).after(4, 3.0)
    consulting = usually(long)
    assert consulting.decide([], long, "eagle").pace == pytest.approx(long.speed, rel=0.01)
    assert consulting.decide([], plain, "eagle").pace == pytest.approx((plain.speed * long.speed) ** 0.5, rel=0.02)
    for streams in (2, 4):
        many = worth(model, streams)
        usual = streams * long.speed
        assert consulting.decide([], many, "eagle").pace == pytest.approx((many.speed * usual) ** 0.5, rel=0.1)
    prompts = replace(plain, usual=2)
    assert consulting.decide([], prompts, "eagle").pace == prompts.speed, "what these rounds are worth is known"


def test_a_call_that_pays_by_the_tokens_of_its_round_alone_is_not_made_where_others_give_many() -> None:
    model = costs(0.0005)  # three tokens take .15 of a forward
    plain, long = worth(model), worth(model).after(4, 3.0)
    for usual, members in ((plain, [0]), (long, [])):
        consulting = usually(usual)
        for _ in range(100):
            for levels in (1, 2, 3):
                consulting.observe([0.05], [0.2 * levels / 3], [levels])
        consulting.decide(of(0.05), plain, "eagle")  # may be a probe
        assert consulting.decide(of(0.05), plain, "eagle").members == members


def test_it_is_counted_how_many_of_the_promised_tokens_come_until_the_weights_change() -> None:
    consulting = Consulting(3)
    assert consulting.kept == 1
    for came in [0, 1, 0, 0] * 1000:
        consulting.outcome(0.5, came)
    assert consulting.kept == pytest.approx(0.5, rel=0.01)
    consulting.renew()
    assert consulting.kept == 1


def test_new_weights_are_tried_again() -> None:
    model, consulting = costs(0.0005), Consulting(3)
    asked(consulting, 200, 0.0, model)
    assert sum(map(bool, asked(consulting, 50, 0.3, model))) < 5
    consulting.renew()
    assert all(asked(consulting, 50, 0.3, model))


def test_what_was_tried_for_long_without_gain_is_tried_less_often_until_the_weights_change() -> None:
    model, consulting = costs(0.0005), Consulting(3)

    def probes(rounds: int) -> int:
        return sum(map(bool, asked(consulting, rounds, 0.05, model)))

    asked(consulting, 300, 0.05, model)
    first = probes(1000)
    assert 20 <= first <= 34
    asked(consulting, 10_000, 0.05, model)
    assert 3 <= probes(1000) <= first / 2
    consulting.renew()
    asked(consulting, 300, 0.05, model)
    assert abs(probes(1000) - first) <= 1


def test_a_drafter_that_knows_nothing_costs_little() -> None:
    """At most 2 percent of the time, over a few hundred rounds, at whatever certainty recall has."""
    model, consulting = costs(0.0007), Consulting(3)
    rng = np.random.default_rng(3)
    spent = 0.0
    for _ in range(600):
        sure = float(rng.random())
        found = consulting.decide(of(sure), worth(model), "eagle")
        if found.members:
            spent += model.proposal("eagle", 1, found.levels)
            consulting.observe([sure], [0.0], [found.levels])
    assert 0 < spent < 0.02 * 600 * FORWARD


def test_what_is_at_hand_is_expected_to_add_what_it_brought_as_often_as_it_was_asked_for() -> None:
    model, consulting = costs(0.0005), Consulting(3)
    before = consulting.added
    assert before[0] == 0
    assert before[1] < before[2] < before[3]
    for _ in range(200):
        consulting.decide(of(0.3), worth(model), "eagle")
        consulting.observe([0.3], [0.6], [2])
    assert consulting.added[2] == pytest.approx(0.6, abs=0.01)
    for _ in range(200):
        consulting.decide(of(0.95), worth(model), "eagle")
    assert consulting.added[2] < 0.05
    consulting.renew()
    assert consulting.added == before


def test_nobody_is_asked_for_where_the_drafter_sees_nothing() -> None:
    assert Consulting(3).decide([], worth(costs(0.0005)), "eagle").members == []


def test_where_hardly_any_call_pays_few_sequences_may_still_ask_until_the_weights_change() -> None:
    model, consulting = costs(0.0005), Consulting(3)

    def open_to(sequences: int, gain: float) -> int:
        may = 0
        for _ in range(sequences):
            if consulting.may_ask():
                may += 1
                asked(consulting, 30, gain, model)
        return may

    assert open_to(20, 0.3) == 20
    open_to(60, 0.0)
    assert open_to(80, 0.0) == 10
    assert open_to(16, 0.0) == 2
    consulting.renew()
    assert open_to(20, 0.3) == 20


def test_sequences_of_which_it_has_nothing_to_say_are_no_calls_that_pay() -> None:
    consulting = Consulting(3)
    for _ in range(100):
        consulting.decide([], worth(costs(0.0005)), "prompt_tokens", silent=8)
    assert sum(consulting.may_ask() for _ in range(80)) == 10


def test_those_that_ask_find_out_that_it_pays_again() -> None:
    model, consulting = costs(0.0005), Consulting(3)
    asked(consulting, 2000, 0.0, model)
    assert sum(consulting.may_ask() for _ in range(80)) == 10
    asked(consulting, 2000, 0.4, model)  # of one of them
    assert all(consulting.may_ask() for _ in range(80))
