"""Gain of calls of a trained drafter in addition to recall, in simulated time."""

from __future__ import annotations

import numpy as np
import pytest

from osd.economy.calls import CallGains, Candidate
from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget

STEP, LEVELS = 0.010, 3


def costs(call: float, reading: float = 0.0) -> CostModel:
    """A call takes ``call`` seconds for each token of the draft, and 500 tokens of a prompt take ``reading``."""
    model = CostModel({1: STEP, 64: STEP})
    for levels in range(1, LEVELS + 1):
        for sequences in (1, 2, 3, 4):
            model.observe_proposal("eagle", sequences, levels, call * levels * (0.9 + 0.1 * sequences))
    for tokens in (1, 5, 20, 50, 200, 500) if reading else ():
        seconds = model.proposal("eagle", 1, LEVELS) + reading * tokens / 500
        model.observe_proposal("eagle", 1, LEVELS, seconds, missed=tokens)
    return model


def budget(model: CostModel, rho: float = 1 / STEP) -> StepBudget:
    return StepBudget(rho, 1, np.full(40, STEP), model)


def candidate(certainty: float, missed: int = 0, left: int = 200, called: bool = True) -> Candidate:
    return Candidate(certainty, missed, left, LEVELS, called)


def calls(gains: CallGains, steps: int, gain: float, model: CostModel, certainty: float = 0.3) -> list[int]:
    """Return the draft length of the call in each step; the longest draft adds ``gain`` tokens."""
    lengths = []
    for _ in range(steps):
        members, levels = gains.decide([candidate(certainty)], budget(model), "eagle")
        lengths.append(levels)
        if members:
            gains.observe(certainty, levels, gain * levels / LEVELS)
    return lengths


def test_calls_continue_while_their_gain_exceeds_their_cost() -> None:
    model = costs(0.0005)  # three tokens take the time of .15 tokens
    assert all(calls(CallGains(LEVELS), 300, 0.3, model)[-200:])
    assert sum(map(bool, calls(CallGains(LEVELS), 1300, 0.05, model)[-1000:])) < 20


def test_call_of_unknown_cost_is_made() -> None:
    assert calls(CallGains(LEVELS), 1, 0.0, CostModel({1: STEP, 64: STEP})) == [LEVELS]


def test_first_call_without_gain_does_not_end_calls() -> None:
    model, gains = costs(0.0005), CallGains(LEVELS)
    members, levels = gains.decide([candidate(0.3)], budget(model), "eagle")
    assert members
    gains.observe(0.3, levels, -2.0)
    assert all(calls(gains, 200, 0.4, model))


def test_call_gains_less_when_steps_gain_more_tokens() -> None:
    model = costs(0.0005)
    for rho, members in ((1 / STEP, [0]), (4 / STEP, [])):
        gains = CallGains(LEVELS)
        for levels in range(1, LEVELS + 1):
            for _ in range(100):
                gains.observe(0.3, levels, 0.3 * levels / LEVELS)
        assert gains.decide([candidate(0.3)], budget(model, rho), "eagle")[0] == members


def test_calls_are_only_for_sequences_with_low_certainty() -> None:
    model, gains = costs(0.001), CallGains(LEVELS)
    for _ in range(100):
        for certainty, gain in ((0.15, 0.8), (0.95, 0.0)):
            for levels in range(1, LEVELS + 1):
                gains.observe(certainty, levels, gain)
    decision = gains.decide([candidate(0.95), candidate(0.15)] * 2, budget(model, 4 / STEP), "eagle")
    assert decision == ([1, 3], 1), "further tokens bring nothing more"


def test_prompt_is_read_only_before_enough_calls() -> None:
    model, gains = costs(0.0005, reading=0.05), CallGains(LEVELS)
    for levels in range(1, LEVELS + 1):
        for _ in range(100):
            gains.observe(0.3, levels, 0.4)
            gains.observe(0.95, levels, 0.0)

    def reads(left: int) -> bool:
        return bool(gains.decide([candidate(0.3, 500, left, called=False)], budget(model), "eagle")[0])

    assert reads(1000)
    assert not reads(3)
    assert reads(200)
    for _ in range(300):
        gains.decide([candidate(0.95)], budget(model), "eagle")
    assert not reads(200), "hardly any step asks"


def test_new_version_is_called_at_once() -> None:
    model, gains = costs(0.0005), CallGains(LEVELS)
    calls(gains, 200, 0.0, model)
    assert sum(map(bool, calls(gains, 50, 0.3, model))) < 5
    gains.renew()
    assert all(calls(gains, 50, 0.3, model))


@pytest.mark.parametrize("call", [0.0001, 0.0005, 0.001])
def test_useless_drafter_costs_at_most_half_a_percent(call: float) -> None:
    """At every certainty of recall; the first hundred calls are the price of a new drafter."""
    model, gains, draw = costs(call), CallGains(LEVELS), np.random.default_rng(3)
    spent, steps = 0.0, 20_000
    for step in range(steps):
        certainty = float(draw.random())
        members, levels = gains.decide([candidate(certainty)], budget(model), "eagle")
        if members:
            spent += model.proposal("eagle", 1, levels) if step >= 4000 else 0.0
            gains.observe(certainty, levels, 0.0)
    assert 0 < spent < 0.005 * (steps - 4000) * STEP


def test_improved_drafter_is_called_within_thousands_of_steps() -> None:
    model, gains = costs(0.0005), CallGains(LEVELS)
    calls(gains, 5000, 0.0, model)
    lengths = calls(gains, 4000, 0.4, model)
    assert all(lengths[-500:])
    assert not all(lengths[:100])


def test_prompts_are_read_again_for_an_improved_drafter() -> None:
    """Answers of 40 tokens after prompts of 200 tokens, which take half a step to read."""
    model, gains, draw = costs(0.0005, reading=0.0125), CallGains(LEVELS), np.random.default_rng(1)
    spent, made, steps, missed = 0.0, 0, 8000, 0
    for step in range(steps):
        missed = 200 if step % 40 == 0 else missed + 1
        certainty, good = float(draw.random()), step >= steps / 2
        sequence = candidate(certainty, missed, 64 - step % 40, called=missed < 200)
        members, levels = gains.decide([sequence], budget(model), "eagle")
        if members:
            spent += 0.0 if good else model.proposal("eagle", 1, levels) + model.reading("eagle", missed)
            gains.observe(certainty, levels, 0.6 * good * (1 - certainty) * levels / LEVELS)
            made += step >= steps - 1000
            missed = 0
    assert made > 500
    assert 0 < spent < 0.005 * steps / 2 * STEP


def test_calls_stop_when_the_drafter_becomes_bad() -> None:
    model, gains = costs(0.0005), CallGains(LEVELS)
    assert all(calls(gains, 3000, 0.4, model))
    assert sum(map(bool, calls(gains, 1000, 0.0, model)[300:])) < 20


def test_added_tokens_scale_with_the_share_of_calls() -> None:
    model, gains = costs(0.0005), CallGains(LEVELS)
    before = gains.added
    assert before[0] == 0
    assert before[1] < before[2] < before[3]
    for _ in range(200):
        gains.decide([candidate(0.3)], budget(model), "eagle")
        gains.observe(0.3, 2, 0.6)
    assert gains.added[2] == pytest.approx(0.6, abs=0.01)
    for _ in range(500):
        gains.decide([candidate(0.95)], budget(model), "eagle")
    assert gains.added[2] < 0.05
    gains.renew()
    assert gains.added == before


def test_no_candidate_means_no_call() -> None:
    assert CallGains(LEVELS).decide([], budget(costs(0.0005)), "eagle") == ([], 0)
