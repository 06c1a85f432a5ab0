from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from osd.analysis.scaling.forecast import Forecaster, largest
from osd.analysis.scaling.points import ScalingError, Speed
from tests.unit.analysis import made_up
from tests.unit.analysis.made_up import GREEDY, LAW, PLAIN, REST, RUN, SAMPLED, SIZES, VERIFY, points


@pytest.fixture(scope="module")
def forecaster():
    return Forecaster(points(noise=0.002))


def test_a_drafter_between_the_measured_ones_is_what_the_curves_say(forecaster):
    found = forecaster.predict(6_000_000, 6000).expected
    divergence = float(LAW.loss(6_000_000, 6000))
    assert found.divergence == pytest.approx(divergence, rel=0.01)
    assert found.sampled.acceptance == pytest.approx(float(SAMPLED.acceptance(divergence)), abs=0.005)
    assert found.greedy.acceptance == pytest.approx(float(GREEDY.acceptance(divergence)), abs=0.005)
    assert found.step == pytest.approx(made_up.step(6_000_000), rel=1e-6)
    assert found.seconds == pytest.approx(6000 * made_up.seconds(6_000_000), rel=1e-6)


@pytest.mark.parametrize("way", ["sampled", "greedy"])
def test_speed_and_payback_follow_from_acceptance_and_the_cost_of_a_round(forecaster, way):
    prediction = forecaster.predict(8_000_000, 10_000).expected
    found, rest = getattr(prediction, way), forecaster.model.rest
    assert rest == pytest.approx(REST, abs=0.02)
    speeds = {
        k: sum(found.acceptance**i for i in range(k + 1)) / (k * prediction.step + VERIFY[k - 1] + rest)
        for k in range(1, 9)
    }
    assert found.depth == max(speeds, key=lambda k: speeds[k])
    assert found.speedup == pytest.approx(speeds[found.depth])
    saved_per_token = PLAIN - PLAIN / found.speedup
    assert found.payback * saved_per_token == pytest.approx(prediction.seconds)


def test_a_drafter_that_saves_nothing_never_pays():
    slow = [msgspec.structs.replace(one, speed=Speed(0.5, 0.5, 0.5, one.length)) for one in points(noise=0.002)]
    assert Forecaster(slow).model.predict(8_000_000, 10_000, depth=4).greedy.payback == math.inf


def test_an_interval_holds_the_expected_value_and_grows_with_the_distance(forecaster):
    near, far = forecaster.predict(6_000_000, 6000), forecaster.predict(60_000_000, 80_000)
    for found in (near, far):
        for least, value, most in zip(found.least.values(), found.expected.values(), found.most.values(), strict=True):
            assert 0.99 * least <= value <= 1.01 * most
    width = [found.most.divergence - found.least.divergence for found in (near, far)]
    assert width[1] > width[0] > 0


@pytest.mark.soak
def test_nine_in_ten_new_points_lie_in_their_intervals():
    inside = []
    for seed in range(12):
        generator = np.random.default_rng(100 + seed)
        forecaster = Forecaster(points(noise=0.02, seed=seed))
        for size, tokens in ((3_000_000, 3000), (6_000_000, 9000), (12_000_000, 6000), (20_000_000, 12_000)):
            found = forecaster.predict(size, tokens)
            for true in LAW.loss(size, tokens) + 0.02 * generator.normal(size=10):
                inside.append(found.least.divergence <= true <= found.most.divergence)
    print(f"{np.mean(inside):.3f} of {len(inside)} new points are inside")
    assert 0.8 <= np.mean(inside) <= 0.98


def test_the_largest_drafter_is_predicted_from_the_others():
    made = points(noise=0.002)
    rest, held = Forecaster.without(largest(made)["the largest drafter"], made)
    assert {point.parameters for point in rest.points} == set(SIZES[:-1])
    assert [(point.parameters, point.records) for point in held] == [(SIZES[-1], n) for n in (64, 128, 256)]
    for point in held:
        found = rest.model.predict(point.parameters, point.tokens, point.run.depth)
        assert found.greedy.acceptance == pytest.approx(point.agreement, abs=0.03)
        assert found.greedy.length / found.greedy.speedup == pytest.approx(point.round_cost, rel=0.02)


def test_the_largest_run_has_the_most_parameters_times_tokens():
    made = points(SIZES[:3]) + points(SIZES[3:], made_up.RECORDS[:1])
    (held,) = largest(made)["the largest run"]
    assert (held.parameters, held.records) == (SIZES[2], made_up.RECORDS[-1])
    rest, predicted = Forecaster.without([held], made)
    assert (len(rest.points), predicted) == (12, [held])


@pytest.mark.parametrize(
    ("sizes", "records", "told"),
    [
        (SIZES, made_up.RECORDS[:2], "not 8 of 4 and 2"),
        (SIZES[:2], made_up.RECORDS, "not 8 of 2 and 4"),
        (SIZES[:1], made_up.RECORDS, "not 4 of 1 and 4"),
        ((), (), "not 0 of 0 and 0"),
    ],
)
def test_too_few_points_are_refused_with_how_many_are_needed(sizes, records, told):
    with pytest.raises(ScalingError, match=r"needs 7 points of 3 sizes and 3 amounts of traffic, " + told):
        Forecaster(points(sizes, records))


def test_six_points_are_too_few_whatever_their_sizes_and_amounts():
    made = points(SIZES[:3], made_up.RECORDS[:3])
    with pytest.raises(ScalingError, match="not 6 of 3 and 3"):
        Forecaster(made[:2] + made[3:4] + made[5:8])


def test_the_form_with_the_lower_criterion_is_used():
    model = Forecaster(points(noise=0.02)).model
    assert model.fit.criterion < model.other.criterion
    assert model.fit.error > model.other.error


def test_seven_points_of_three_sizes_and_three_amounts_are_enough():
    made = points(SIZES[:3], made_up.RECORDS[:3], noise=0.002)
    assert Forecaster(made[:7]).model.predict(6_000_000, 3000).divergence > 0


def test_points_of_two_runs_are_refused():
    other = msgspec.structs.replace(RUN, stream="other")
    with pytest.raises(ScalingError, match="several runs"):
        Forecaster([*points(), *points(run=other)])


@pytest.mark.parametrize(
    ("parameters", "tokens", "told"),
    [
        (161_000_000, 90_000, r"161,000,000 parameters are more than a decade outside of the 2,000,000 to 16,000,000"),
        (199_000, 2000, r"199,000 parameters"),
        (2_000_000, 102_500, r"102,500 tokens of traffic are more than a decade outside of the 1,280 to 10,240"),
        (200_000, 127, r"127 tokens of traffic"),
        (16_000_000, 1270, r"fewer for each parameter than any drafter was measured with: 1,280 are the least"),
    ],
)
def test_what_the_points_say_nothing_of_is_refused(forecaster, parameters, tokens, told):
    with pytest.raises(ScalingError, match=told):
        forecaster.predict(parameters, tokens)


@pytest.mark.parametrize(("parameters", "tokens"), [(160_000_000, 102_400), (200_000, 128), (16_000_000, 1280)])
def test_a_decade_beyond_what_was_measured_is_still_predicted(forecaster, parameters, tokens):
    assert forecaster.predict(parameters, tokens).expected.divergence > 0


def test_the_parameters_of_a_size_follow_from_its_layers(forecaster):
    assert forecaster.parameters_of(3) == 6_000_000


def test_the_same_points_give_the_same_intervals(forecaster):
    again = Forecaster(points(noise=0.002))
    assert again.predict(6_000_000, 6000) == forecaster.predict(6_000_000, 6000)
