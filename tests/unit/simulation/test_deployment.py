"""A whole deployment: nothing is lost, chance is repeatable, and more means no less."""

from __future__ import annotations

import itertools

import pytest

from osd.capture.budget import SECONDS
from osd.simulation.bill import Account, Bill
from osd.simulation.deployment import Deployment
from osd.simulation.knowledge import PLAIN, TRAINED, UNTRAINED
from osd.simulation.training_process import spread
from osd.traffic.arrivals import Arrival
from tests.unit.simulation.toys import Toy, scenario, settings

COSTS = Toy(base=0.01, row=0.0005, read=0.0002)
FAST = {"trainer": {"steps_per_candidate": 10, "micro_batch_tokens": 128, "duty": 1.0}}


def run(way=TRAINED, costs=COSTS, traced=None, replicas=4, trainer=FAST, **changed):
    return Deployment(settings(replicas, **trainer), scenario(**changed), costs, way, traced).run()


def test_a_seed_repeats_everything_and_another_one_does_not():
    one, same, other = run(), run(), run(seed=1)
    assert one == same
    assert one != other


@pytest.mark.parametrize("way", [PLAIN, UNTRAINED, TRAINED])
def test_every_request_of_a_trace_is_answered_once(way):
    traced = [Arrival(0.1 * n, 1 + n % 30, 1 + n % 50) for n in range(500)]
    found = run(way, traced=traced, replicas=2)
    assert found.work.answered == 500
    assert found.work.tokens == sum(one.tokens for one in traced)
    assert found.work.prompt_tokens == sum(one.prompt for one in traced)
    assert found.work.refused == 0
    assert found.curve[-1].requests == 500


def test_each_simulated_replica_stands_for_as_many_others():
    few, all_ = run(PLAIN, replicas=2), run(PLAIN, replicas=200)
    assert all_.work.answered == 100 * few.work.answered
    assert all_.work.busy == pytest.approx(100 * few.work.busy)
    assert all_.curve[-1].tokens == 100 * few.curve[-1].tokens


def within(**capture):
    return run(trainer={**FAST, "capture": capture})


def test_states_of_few_records_are_written_where_a_trainer_does_not_come_along():
    traced = [Arrival(0.1 * n, 20, 30) for n in range(1000)]
    fast, slow = (run(traced=traced, replicas=1, trainers={"tokens_per_second": speed}) for speed in (10_000, 1))
    assert slow.captured.records == fast.captured.records == 1000
    assert slow.captured.written < 0.6 * fast.captured.written


def test_what_is_written_is_within_the_budget_and_what_is_not_is_counted():
    free = run()
    assert free.captured.over_budget == 0
    assert free.captured.records == free.work.answered
    rate = int(0.2 * free.captured.written / free.seconds)
    # A budget may be off by what its draws are, and by the burst that it begins with.
    for found in (within(service_bytes_per_second=rate), within(bytes_per_second=rate // 4)):
        assert 0.6 * rate * found.seconds < found.captured.written < 1.4 * rate * (found.seconds + SECONDS)
        assert found.captured.records + found.captured.over_budget == found.work.answered
    wide = {"hidden_width": 8192}
    whole, rounded = (run(trainer={**FAST, "capture": {"states": states}}, capture=wide) for states in ("full", "int8"))
    assert rounded.captured.written == pytest.approx(whole.captured.written * (1 + 2 / 64) / 2, rel=0.02)


def test_what_a_trainer_cannot_read_is_trimmed_and_counted():
    found = run(trainers={"network_mb_per_second": 1e-4}, trainer={**FAST, "capture": {"keep_mb": 1}})
    assert found.captured.unread > 0
    assert found.captured.read_bytes <= 1e2 * found.seconds + (1 << 20)


def test_more_trainers_never_learn_later():
    goal, reached = 0.1, []
    for count in (1, 2, 3):
        found = run(seconds=200, domains={"skew": 0.0, "tokens": 30_000}, trainers={"count": count})
        levels = [one for one in found.versions if one.level >= goal]
        first = {domain: min((one.made for one in levels if one.domain == domain), default=1e9) for domain in range(3)}
        reached.append(sorted(first.values()))
    print(reached)
    assert reached[0][-1] < 1e9
    for fewer, more in itertools.pairwise(reached):
        assert all(later >= sooner - 1.0 for later, sooner in zip(fewer, more, strict=True))
    assert reached[2][-1] < reached[0][-1] / 2


def test_a_smaller_budget_never_trains_more_and_no_trainer_nothing():
    free = run()
    little = within(service_bytes_per_second=4096)
    assert little.trained_tokens < free.trained_tokens
    none = run(trainers={"count": 0})
    assert (none.captured.written, none.training, none.versions) == (0, 0, [])
    assert none.work == run(UNTRAINED).work


def test_drafts_make_a_token_cheaper_and_training_cheaper_still():
    plain, untrained, trained = (run(way) for way in (PLAIN, UNTRAINED, TRAINED))
    speeds = [one.work.tokens / one.work.busy for one in (plain, untrained, trained)]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.2 * speeds[0]
    assert plain.work.drafted == 0
    assert trained.curve[-1].length > untrained.curve[-1].length


def test_beside_requests_training_takes_no_more_than_its_duty_and_nothing_while_one_waits():
    beside = {"trainers": {"dedicated": False, "count": 1, "tokens_per_second": 1000}, "arrivals": {"rate": 5.0}}
    # Always one request or more, so that there is no idle second but at the very beginning.
    busy = run(trainer={"trainer": {**FAST["trainer"], "duty": 0.1, "price": 0}}, replicas=1, **beside)
    share = busy.work.busy / busy.seconds
    assert busy.training <= (0.1 * share + (1 - share)) * busy.seconds * 1.1
    full = {"engine": {"slots": 1}, "trainer": {**FAST["trainer"], "price": 0}}
    waits = run(trainer=full, replicas=1, **(beside | {"arrivals": {"rate": 8.0}}))
    assert waits.training < 0.2 * waits.seconds


def test_training_beside_a_replica_slows_it():
    beside = {"dedicated": False, "tokens_per_second": 1000}
    price = {"trainer": {**FAST["trainer"], "price": 0}}
    quiet = run(trainer=price, replicas=1, trainers=beside)
    slowed = run(trainer=price, replicas=1, trainers={**beside, "slowing": 0.5})
    assert slowed.work.busy / slowed.work.tokens > 1.02 * quiet.work.busy / quiet.work.tokens


def test_a_trainer_yields_to_all_replicas_of_its_machine():
    beside = {"trainers": {"dedicated": False, "tokens_per_second": 1000}, "arrivals": {"rate": 2.0}}
    settled = {"trainer": {**FAST["trainer"], "duty": 0.01, "price": 0}}
    alone, together = (
        run(trainer=settled, replicas=2, versions={"replicas_per_node": count}, **beside) for count in (1, 2)
    )
    assert together.training < 0.8 * alone.training


def test_drift_takes_what_was_learnt_and_it_is_learnt_again():
    calm = run(domains={"count": 1})
    drifting = run(domains={"count": 1, "drift_hours": 0.005, "drift_loss": 0.9})
    assert drifting.curve[-1].length < calm.curve[-1].length
    lengths = [one.length for one in drifting.curve]
    falls = [n for n, (before, after) in enumerate(itertools.pairwise(lengths)) if after < before - 0.1]
    assert falls
    assert max(lengths[falls[0] + 1 :]) > lengths[falls[0] + 1]


def test_domains_are_spread_so_that_trainers_have_about_as_much():
    shares = [0.4, 0.3, 0.2, 0.1]
    assert spread(shares, 1) == [[0, 1, 2, 3]]
    assert spread(shares, 2) == [[0, 3], [1, 2]]
    assert sorted(itertools.chain(*spread(shares, 3))) == [0, 1, 2, 3]


def bill(**changed):
    assumed = scenario(**changed)
    own = settings(4, **FAST)
    return Bill.of(
        own, assumed, COSTS, {way: Deployment(own, assumed, COSTS, way).run() for way in (PLAIN, UNTRAINED, TRAINED)}
    )


def test_a_bill_adds_up():
    found = bill(prices={"gigabyte": 2.0, "trainer_hour": 3.0})
    assert found.net == pytest.approx(found.saved_by_training - found.trainers - found.stores - found.traffic)
    assert found.trainers == pytest.approx(3.0 * found.hours)
    assert found.account[0] == Account(0.0, 0.0, 0.0)
    assert found.account[-1].cost == pytest.approx(found.paid)
    assert found.account[-1].saved == pytest.approx(found.saved_by_training)
    assert found.needed[TRAINED] < found.needed[UNTRAINED] < found.needed[PLAIN]
    free = bill(prices={"gigabyte": 0.0, "trainer_hour": 0.0, "store_hour": 0.0})
    assert free.paid == 0
    assert free.net == pytest.approx(found.saved_by_training)
    assert free.payback is not None


def test_replicas_needed_are_those_that_give_as_many_tokens_with_all_slots_taken():
    found = bill()
    # Eight streams, one token each: a round takes .014 s, and prompts what they took.
    plain = Deployment(settings(4), scenario(), COSTS, PLAIN).run()
    reading = plain.work.reading / plain.work.tokens
    speed = 8 / (0.014 + 8 * reading)
    assert found.needed[PLAIN] == pytest.approx(plain.work.tokens / plain.seconds / speed, rel=1e-6)


def test_as_many_redis_servers_are_paid_as_what_is_written_needs():
    mean = run().captured.written / run().seconds
    found = bill(capture={"store_mb_per_second": 0.4 * mean / 1e6})
    assert 3 <= found.redis_servers <= 5
    assert found.stores == pytest.approx(found.redis_servers * found.hours * 0.1)
