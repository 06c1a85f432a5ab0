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


def test_interpolated_drafter_follows_the_curves(forecaster):
    result = forecaster.predict(6_000_000, 6000).expected
    divergence = float(LAW.loss(6_000_000, 6000))
    assert result.divergence == pytest.approx(divergence, rel=0.01)
    assert result.sampled.acceptance == pytest.approx(float(SAMPLED.acceptance(divergence)), abs=0.005)
    assert result.greedy.acceptance == pytest.approx(float(GREEDY.acceptance(divergence)), abs=0.005)
    assert result.step == pytest.approx(made_up.step(6_000_000), rel=1e-6)
    assert result.seconds == pytest.approx(6000 * made_up.seconds(6_000_000), rel=1e-6)


@pytest.mark.parametrize("way", ["sampled", "greedy"])
def test_speed_and_payback_follow_from_acceptance_and_costs(forecaster, way):
    prediction = forecaster.predict(8_000_000, 10_000).expected
    result, rest = getattr(prediction, way), forecaster.model.rest
    assert rest == pytest.approx(REST, abs=0.02)
    speeds = {
        k: sum(result.acceptance**i for i in range(k + 1)) / (k * prediction.step + VERIFY[k - 1] + rest)
        for k in range(1, 9)
    }
    assert result.depth == max(speeds, key=lambda k: speeds[k])
    assert result.speedup == pytest.approx(speeds[result.depth])
    saved_per_token = PLAIN - PLAIN / result.speedup
    assert result.payback * saved_per_token == pytest.approx(prediction.seconds)


def test_drafter_without_savings_has_infinite_payback():
    slow = [msgspec.structs.replace(point, speed=Speed(0.5, 0.5, 0.5, point.length)) for point in points(noise=0.002)]
    assert Forecaster(slow).model.predict(8_000_000, 10_000, depth=4).greedy.payback == math.inf


def test_interval_contains_the_expectation_and_grows(forecaster):
    near, far = forecaster.predict(6_000_000, 6000), forecaster.predict(60_000_000, 80_000)
    for result in (near, far):
        for least, value, most in zip(
            result.least.values(), result.expected.values(), result.most.values(), strict=True
        ):
            assert 0.99 * least <= value <= 1.01 * most
    width = [result.most.divergence - result.least.divergence for result in (near, far)]
    assert width[1] > width[0] > 0


@pytest.mark.soak
def test_nine_in_ten_new_points_lie_in_their_intervals():
    inside = []
    for seed in range(12):
        generator = np.random.default_rng(100 + seed)
        forecaster = Forecaster(points(noise=0.02, seed=seed))
        for size, tokens in ((3_000_000, 3000), (6_000_000, 9000), (12_000_000, 6000), (20_000_000, 12_000)):
            result = forecaster.predict(size, tokens)
            for true in LAW.loss(size, tokens) + 0.02 * generator.normal(size=10):
                inside.append(result.least.divergence <= true <= result.most.divergence)
    print(f"{np.mean(inside):.3f} of {len(inside)} new points are inside")
    assert 0.8 <= np.mean(inside) <= 0.98


def test_largest_drafter_is_predicted_from_the_other_points():
    made = points(noise=0.002)
    rest, held = Forecaster.without(largest(made)["the largest drafter"], made)
    assert {point.parameters for point in rest.points} == set(SIZES[:-1])
    assert [(point.parameters, point.records) for point in held] == [(SIZES[-1], n) for n in (64, 128, 256)]
    for point in held:
        result = rest.model.predict(point.parameters, point.tokens, point.run.depth)
        assert result.greedy.acceptance == pytest.approx(point.agreement, abs=0.03)
        assert result.greedy.length / result.greedy.speedup == pytest.approx(point.round_cost, rel=0.02)


def test_largest_run_has_the_most_compute():
    made = points(SIZES[:3]) + points(SIZES[3:], made_up.RECORDS[:1])
    (held,) = largest(made)["the largest run"]
    assert (held.parameters, held.records) == (SIZES[2], made_up.RECORDS[-1])
    rest, predicted = Forecaster.without([held], made)
    assert (len(rest.points), predicted) == (12, [held])


@pytest.mark.parametrize(("sizes", "records", "message"), [
    (SIZES, made_up.RECORDS[:2], "not 8 of 4 and 2"),
    (SIZES[:2], made_up.RECORDS, "not 8 of 2 and 4"),
    (SIZES[:1], made_up.RECORDS, "not 4 of 1 and 4"),
    ((), (), "not 0 of 0 and 0"),
])  # fmt: skip
def test_too_few_points_are_refused_with_the_minimum(sizes, records, message):
    with pytest.raises(ScalingError, match=r"needs 7 points of 3 sizes and 3 amounts of traffic, " + message):
        Forecaster(points(sizes, records))


def test_six_points_are_refused():
    made = points(SIZES[:3], made_up.RECORDS[:3])
    with pytest.raises(ScalingError, match="not 6 of 3 and 3"):
        Forecaster(made[:2] + made[3:4] + made[5:8])


def test_form_with_the_lower_criterion_is_used():
    model = Forecaster(points(noise=0.02)).model
    assert model.fit.criterion < model.other.criterion
    assert model.fit.error > model.other.error


def test_seven_points_of_three_sizes_and_amounts_suffice():
    made = points(SIZES[:3], made_up.RECORDS[:3], noise=0.002)
    assert Forecaster(made[:7]).model.predict(6_000_000, 3000).divergence > 0


def test_points_of_several_runs_are_refused():
    other = msgspec.structs.replace(RUN, stream="other")
    with pytest.raises(ScalingError, match="several runs"):
        Forecaster([*points(), *points(run=other)])


@pytest.mark.parametrize(("parameters", "tokens", "message"), [
    (161_000_000, 90_000, r"161,000,000 parameters are more than a decade outside of the 2,000,000 to 16,000,000"),
    (199_000, 2000, r"199,000 parameters"),
    (2_000_000, 102_500, r"102,500 tokens of traffic are more than a decade outside of the 1,280 to 10,240"),
    (200_000, 127, r"127 tokens of traffic"),
    (16_000_000, 1270, r"fewer for each parameter than any drafter was measured with: 1,280 are the least"),
])  # fmt: skip
def test_prediction_far_from_the_points_is_refused(forecaster, parameters, tokens, message):
    with pytest.raises(ScalingError, match=message):
        forecaster.predict(parameters, tokens)


@pytest.mark.parametrize(("parameters", "tokens"), [(160_000_000, 102_400), (200_000, 128), (16_000_000, 1280)])
def test_prediction_a_decade_beyond_the_points_is_allowed(forecaster, parameters, tokens):
    assert forecaster.predict(parameters, tokens).expected.divergence > 0


def test_equal_points_give_equal_intervals(forecaster):
    again = Forecaster(points(noise=0.002))
    assert again.predict(6_000_000, 6000) == forecaster.predict(6_000_000, 6000)
