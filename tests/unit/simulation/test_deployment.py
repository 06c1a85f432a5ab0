"""Whole simulated deployments: conservation of requests, repeatable randomness, and monotonic effects."""

from __future__ import annotations

import itertools

import pytest

from osd.capture.budget import SECONDS
from osd.simulation.bill import AccountPoint, Bill
from osd.simulation.deployment import Deployment
from osd.simulation.knowledge import PLAIN, TRAINED, UNTRAINED
from osd.simulation.training_process import assign_domains
from osd.traffic.arrivals import Arrival
from tests.unit.simulation.toys import Toy, scenario, settings

COSTS = Toy(base=0.01, row=0.0005, read=0.0002)
FAST = {"trainer": {"steps_per_candidate": 10, "micro_batch_tokens": 128, "duty": 1.0}}


def run(way=TRAINED, costs=COSTS, traced=None, replicas=4, trainer=FAST, **changed):
    return Deployment(settings(replicas, **trainer), scenario(**changed), costs, way, traced).run()


def test_seed_determines_the_whole_run():
    first, same, other = run(), run(), run(seed=1)
    assert first == same
    assert first != other


@pytest.mark.parametrize("way", [PLAIN, UNTRAINED, TRAINED])
def test_each_request_of_a_trace_is_answered_once(way):
    traced = [Arrival(0.1 * n, 1 + n % 30, 1 + n % 50) for n in range(500)]
    result = run(way, traced=traced, replicas=2)
    assert result.work.answered == 500
    assert result.work.tokens == sum(arrival.tokens for arrival in traced)
    assert result.work.prompt_tokens == sum(arrival.prompt for arrival in traced)
    assert result.work.refused == 0
    assert result.curve[-1].requests == 500


def test_simulated_replica_represents_several_replicas():
    few, all_ = run(PLAIN, replicas=2), run(PLAIN, replicas=200)
    assert all_.work.answered == 100 * few.work.answered
    assert all_.work.busy == pytest.approx(100 * few.work.busy)
    assert all_.curve[-1].tokens == 100 * few.curve[-1].tokens


def within(**capture):
    return run(trainer={**FAST, "capture": capture})


def test_slow_trainer_gets_states_of_few_records():
    traced = [Arrival(0.1 * n, 20, 30) for n in range(1000)]
    fast, slow = (run(traced=traced, replicas=1, trainers={"tokens_per_second": speed}) for speed in (10_000, 1))
    assert slow.captured.records == fast.captured.records == 1000
    assert slow.captured.written < 0.6 * fast.captured.written


def test_written_bytes_stay_within_the_capture_budget():
    free = run()
    assert free.captured.over_budget == 0
    assert free.captured.records == free.work.answered
    rate = int(0.2 * free.captured.written / free.seconds)
    # The written bytes differ from the budget by random draws and by the initial burst.
    for result in (within(service_bytes_per_second=rate), within(bytes_per_second=rate // 4)):
        assert 0.6 * rate * result.seconds < result.captured.written < 1.4 * rate * (result.seconds + SECONDS)
        assert result.captured.records + result.captured.over_budget == result.work.answered
    wide = {"hidden_width": 8192}
    whole, rounded = (run(trainer={**FAST, "capture": {"states": states}}, capture=wide) for states in ("full", "int8"))
    assert rounded.captured.written == pytest.approx(whole.captured.written * (1 + 2 / 64) / 2, rel=0.02)


def test_unread_records_are_trimmed_and_counted():
    result = run(trainers={"network_mb_per_second": 1e-4}, trainer={**FAST, "capture": {"keep_mb": 1}})
    assert result.captured.unread > 0
    assert result.captured.read_bytes <= 1e2 * result.seconds + (1 << 20)


def test_more_trainers_never_learn_later():
    goal, reached = 0.1, []
    for count in (1, 2, 3):
        result = run(seconds=200, domains={"skew": 0.0, "tokens": 30_000}, trainers={"count": count})
        good = [version for version in result.versions if version.level >= goal]
        first = {domain: min((v.made for v in good if v.domain == domain), default=1e9) for domain in range(3)}
        reached.append(sorted(first.values()))
    print(reached)
    assert reached[0][-1] < 1e9
    for fewer, more in itertools.pairwise(reached):
        assert all(later >= sooner - 1.0 for later, sooner in zip(fewer, more, strict=True))
    assert reached[2][-1] < reached[0][-1] / 2


def test_smaller_budget_trains_less_and_no_trainer_nothing():
    free = run()
    little = within(service_bytes_per_second=4096)
    assert little.trained_tokens < free.trained_tokens
    none = run(trainers={"count": 0})
    assert (none.captured.written, none.training, none.versions) == (0, 0, [])
    assert none.work == run(UNTRAINED).work


def test_drafts_and_training_make_tokens_cheaper():
    plain, untrained, trained = (run(way) for way in (PLAIN, UNTRAINED, TRAINED))
    speeds = [result.work.tokens / result.work.busy for result in (plain, untrained, trained)]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.2 * speeds[0]
    assert plain.work.drafted == 0
    assert trained.curve[-1].length > untrained.curve[-1].length


def test_training_next_to_requests_respects_its_duty():
    shared = {"trainers": {"dedicated": False, "count": 1, "tokens_per_second": 1000}, "arrivals": {"rate": 5.0}}
    # There is always a request, so that only the start is idle.
    busy = run(trainer={"trainer": {**FAST["trainer"], "duty": 0.1, "price": 0}}, replicas=1, **shared)
    share = busy.work.busy / busy.seconds
    assert busy.training <= (0.1 * share + (1 - share)) * busy.seconds * 1.1
    full = {"engine": {"slots": 1}, "trainer": {**FAST["trainer"], "price": 0}}
    waits = run(trainer=full, replicas=1, **(shared | {"arrivals": {"rate": 8.0}}))
    assert waits.training < 0.2 * waits.seconds


def test_training_slows_a_replica_of_its_machine():
    shared = {"dedicated": False, "tokens_per_second": 1000}
    price = {"trainer": {**FAST["trainer"], "price": 0}}
    quiet = run(trainer=price, replicas=1, trainers=shared)
    slowed = run(trainer=price, replicas=1, trainers={**shared, "slowing": 0.5})
    assert slowed.work.busy / slowed.work.tokens > 1.02 * quiet.work.busy / quiet.work.tokens


def test_trainer_yields_to_all_replicas_of_its_machine():
    shared = {"trainers": {"dedicated": False, "tokens_per_second": 1000}, "arrivals": {"rate": 2.0}}
    limited = {"trainer": {**FAST["trainer"], "duty": 0.01, "price": 0}}
    alone, together = (
        run(trainer=limited, replicas=2, versions={"replicas_per_node": count}, **shared) for count in (1, 2)
    )
    assert together.training < 0.8 * alone.training


def test_drift_removes_learning_that_is_regained():
    calm = run(domains={"count": 1})
    drifting = run(domains={"count": 1, "drift_hours": 0.005, "drift_loss": 0.9})
    assert drifting.curve[-1].length < calm.curve[-1].length
    lengths = [point.length for point in drifting.curve]
    falls = [n for n, (before, after) in enumerate(itertools.pairwise(lengths)) if after < before - 0.1]
    assert falls
    assert max(lengths[falls[0] + 1 :]) > lengths[falls[0] + 1]


def test_assign_domains_balances_the_trainers():
    shares = [0.4, 0.3, 0.2, 0.1]
    assert assign_domains(shares, 1) == [[0, 1, 2, 3]]
    assert assign_domains(shares, 2) == [[0, 3], [1, 2]]
    assert sorted(itertools.chain(*assign_domains(shares, 3))) == [0, 1, 2, 3]


def bill(**changed):
    assumed = scenario(**changed)
    chosen = settings(4, **FAST)
    runs = {way: Deployment(chosen, assumed, COSTS, way).run() for way in (PLAIN, UNTRAINED, TRAINED)}
    return Bill.of(chosen, assumed, COSTS, runs)


def test_bill_adds_up():
    result = bill(prices={"gigabyte": 2.0, "trainer_hour": 3.0})
    assert result.net == pytest.approx(result.saved_by_training - result.trainers - result.stores - result.traffic)
    assert result.trainers == pytest.approx(3.0 * result.hours)
    assert result.account[0] == AccountPoint(0.0, 0.0, 0.0)
    assert result.account[-1].cost == pytest.approx(result.paid)
    assert result.account[-1].saved == pytest.approx(result.saved_by_training)
    assert result.needed[TRAINED] < result.needed[UNTRAINED] < result.needed[PLAIN]
    free = bill(prices={"gigabyte": 0.0, "trainer_hour": 0.0, "store_hour": 0.0})
    assert free.paid == 0
    assert free.net == pytest.approx(result.saved_by_training)
    assert free.payback is not None


def test_needed_replicas_are_computed_for_full_slots():
    result = bill()
    # Eight streams with a token each: a step takes .014 s, plus the seconds of prompts.
    plain = Deployment(settings(4), scenario(), COSTS, PLAIN).run()
    reading = plain.work.reading / plain.work.tokens
    speed = 8 / (0.014 + 8 * reading)
    assert result.needed[PLAIN] == pytest.approx(plain.work.tokens / plain.seconds / speed, rel=1e-6)


def test_redis_servers_follow_from_the_bytes_written():
    mean = run().captured.written / run().seconds
    result = bill(capture={"store_mb_per_second": 0.4 * mean / 1e6})
    assert 3 <= result.redis_servers <= 5
    assert result.stores == pytest.approx(result.redis_servers * result.hours * 0.1)
