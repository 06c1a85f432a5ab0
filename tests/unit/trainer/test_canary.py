from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from tests.unit.trainer.traffic import PIECE, TOKENS, live
from trainer.canary import FEWEST_RECORDS, Canary, Ratio, expected_rate


def trial(seed, old, new, expected=0.0, share=0.5, requests=600, spread=0.1):
    """The first decision and the requests until then, judged after every request as the trainer may."""
    rng = np.random.default_rng(seed)
    canary = Canary(2, 1, expected, ends=float(requests))
    for n in range(requests + 1):
        version = 2 if rng.random() < share else 1
        canary.add(live(rng, version, new if version == 2 else old, spread))
        judgement = canary.judge(float(n))
        if judgement.action != "watch":
            return judgement, n
    raise AssertionError("the time limit was missed")


@pytest.mark.parametrize(
    ("old", "new", "action", "reason"), [(0.4, 0.55, "promote", "->"), (0.55, 0.4, "roll_back", "fell")]
)
def test_a_clearly_different_version_is_judged_soon(old, new, action, reason):
    ends = [trial(seed, old, new) for seed in range(20)]
    lengths = [n for _, n in ends]
    print(f"{action} after {np.median(lengths)} requests, at most {max(lengths)}")
    assert all(judgement.action == action and reason in judgement.reason for judgement, _ in ends)
    assert max(lengths) < 250


def test_looking_after_every_request_does_not_make_errors_likelier():
    # Equal versions: "worse" is wrong. Worse by twice the margin: "not worse" is wrong. Each at most 5 of 100.
    equal = [trial(seed, 0.5, 0.5, requests=250)[0] for seed in range(30)]
    false_alarms = sum("fell" in judgement.reason for judgement in equal)
    worse = [trial(seed, 0.54, 0.5, requests=250)[0] for seed in range(30)]
    false_promotions = sum(judgement.action == "promote" for judgement in worse)
    print(f"of 30 each: {false_alarms} false alarms, {false_promotions} false promotions")
    assert false_alarms <= 4
    assert false_promotions <= 4


def test_an_equal_version_is_promoted_when_there_is_enough_to_tell():
    judgement, n = trial(0, 0.5, 0.5, requests=6000, spread=0.05)
    print(f"promoted after {n} requests")
    assert judgement.action == "promote"


def test_live_acceptance_far_below_the_gate_is_taken_for_corruption_without_any_stable_request():
    rng = np.random.default_rng(0)
    canary = Canary(2, 1, expected=0.6, ends=1000.0)
    for n in range(FEWEST_RECORDS + 10):
        canary.add(live(rng, 2, 0.02))
        judgement = canary.judge(float(n))
        assert (judgement.action == "roll_back") == (n >= FEWEST_RECORDS - 1), n
        if judgement.action != "watch":
            break
    assert "far below the gate's 0.600" in judgement.reason


def test_acceptance_as_the_gate_foresaw_is_no_corruption():
    for seed in range(20):
        judgement, _ = trial(seed, 0.45, 0.5, expected=0.55, requests=200)
        assert "far below" not in judgement.reason


def test_nobody_deciding_within_the_time_limit_means_back():
    canary = Canary(2, 1, 0.5, ends=110.0)
    assert canary.judge(109.9).action == "watch"
    judgement = canary.judge(110.0)
    assert judgement.action == "roll_back"
    assert judgement.reason == "undecided at its time limit, after 0 requests"


def test_a_version_that_drafts_less_but_accepts_more_of_it_is_not_faster():
    # Acceptance per tested token rises, accepted per token falls: rounds get shorter.
    canary = Canary(2, 1, 0.0, ends=1000.0)
    rng = np.random.default_rng(1)
    for _ in range(200):
        canary.add(live(rng, 1, 0.7))
        tested = rng.random(TOKENS) < 0.2
        verdict = np.where(tested, np.where(rng.random(TOKENS) < 0.9, ACCEPTED, REJECTED), NOT_DRAFTED)
        canary.add(msgspec.structs.replace(PIECE, drafter_version=2, verdict=Array.of(verdict.astype(np.int8))))
    judgement = canary.judge(1.0)
    assert canary.figures()["acceptance"] > canary.figures()["baseline_acceptance"]
    assert judgement.action == "roll_back"
    assert "live speed fell" in judgement.reason


def test_requests_without_a_draft_and_of_other_versions_say_nothing():
    canary = Canary(2, 1, 0.0, ends=1000.0)
    canary.add(PIECE)
    canary.add(live(np.random.default_rng(0), 7, 0.5))
    assert canary.figures()["requests"] == canary.figures()["baseline_requests"] == 0


def test_the_standard_error_is_that_of_independent_requests():
    rng = np.random.default_rng(3)
    rates = []
    for _ in range(400):
        ratio = Ratio()
        for mine in rng.beta(4, 4, 50):
            ratio.add(int(rng.binomial(30, mine)), 30)
        rates.append((ratio.rate, ratio.error))
    spread = np.std([rate for rate, _ in rates])
    print(f"spread {spread:.4f}, mean standard error {np.mean([error for _, error in rates]):.4f}")
    assert np.mean([error for _, error in rates]) == pytest.approx(spread, rel=0.1)


def test_certain_rates_are_not_taken_for_certain():
    ratio = Ratio()
    for _ in range(20):
        ratio.add(0, 5)
    chance = 0.5 / 101
    assert ratio.error == pytest.approx((chance * (1 - chance) / 100) ** 0.5)


def test_the_gates_figure_counts_only_the_tokens_that_get_tested():
    assert expected_rate([0.5]) == 0.5
    assert expected_rate([0.8, 0.5, 0.25]) == pytest.approx((0.8 + 0.4 + 0.1) / (1 + 0.8 + 0.4))
    assert expected_rate([]) == 0.0
