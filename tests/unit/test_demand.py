"""How long an engine is busy with what is asked of it, where that can be worked out."""

from __future__ import annotations

import math

import msgspec
import pytest

from osd.demand import Demand, Workload

ALONE = Demand(((0, 1, 1.0), (1, 2, 0.0)), 10.0, 0.0)


def test_many_independent_users_of_an_engine_that_decodes_any_number_at_once():
    """M/M/inf: a round takes 20 ms however many draw a token; so many requests are there as Poisson's law says."""
    demand = Demand(((0, 1, 1.5),), 100.0, 0.0)
    decoding = [0.02 / number for number in range(1, 60)]
    offered = 1.5 * 100 * 0.02
    busy = 1 - math.exp(-offered)
    assert demand.seconds_a_token(decoding) == pytest.approx(busy / (1.5 * 100), rel=1e-9)


@pytest.mark.parametrize(("arrivals", "reading", "decoding", "seconds"), [
    (((0, 1, 3.0), (0, 2, 0.5), (1, 4, 0.1)), 0.003, [0.01] * 20, pytest.approx(0.013)),
    (((0, 1, 1e4), (1, 2, 1e4), (2, 3, 1e4), (3, 4, 0)), 0.0, [0.01, 0.007, 0.005, 0.004], pytest.approx(0.005, 0.01)),
    (((0, 3, 1.0), (1, 2, 0.0), (2, 3, 0.0), (3, 4, 0.0)), 0.0, [0.01, 0.007, 0.004], pytest.approx(0.021 / 3)),
    (((0, 1, 50.0),), 0.0, [0.01, 0.007, 0.005] + 2000 * [0.005], pytest.approx(0.005, 1e-3)),
], ids=["any number costs the same", "users who wait", "requests that come together", "more than fit"])  # fmt: skip
def test_a_token_takes_as_long_as_with_those_who_are_there(arrivals, reading, decoding, seconds):
    assert Demand(arrivals, 100.0, reading).seconds_a_token(decoding) == seconds


def saving_rate(work: Workload, now, after):
    """Where drafts of 0, 1, 2, ... tokens give so many tokens per round."""
    was, would = (work.busy(range(len(lengths)), lengths) for lengths in (now, after))
    return work.share * (was - would) / was


def test_of_users_who_ask_again_at_once_the_same_number_is_saved_as_of_one_alone():
    work = Workload(0.5, ALONE, ((1.0, 1.1, 1.2, 1.3),))
    assert saving_rate(work, [1, 1.5, 1.7], [1, 1.8, 2.4]) == pytest.approx(0.5 * (1.2 / 1.7 - 1.2 / 2.4) / (1.2 / 1.7))


def test_where_users_are_independent_less_is_saved_as_fewer_requests_share_a_round():
    rounds = tuple(tuple(1.0 + 0.1 * streams * (1 + nodes) for nodes in range(3)) for streams in range(1, 9))
    before, after = [1, 1.2, 1.3], [1, 1.8, 2.4]
    waiting = Demand(((0, 4, 1e4), (1, 4, 1e4), (2, 4, 1e4), (3, 4, 1e4), (4, 5, 0.0)), 10.0, 0.0)
    open_ = Demand(((0, 1, 0.35),), 10.0, 0.0)
    saved = [saving_rate(Workload(1.0, demand, rounds), before, after) for demand in (waiting, open_)]
    assert 0 < saved[1] < 0.8 * saved[0]


def test_a_part_of_a_token_takes_a_part_of_its_round_and_to_ask_for_one_takes_what_one_does():
    work = Workload(1.0, ALONE, ((1.0, 1.2, 1.6),))
    assert work.busy([0.0, 1.5], [1.0, 1.75]) == pytest.approx(1.4 / 1.75)
    assert work.busy([0.0, 0.25], [1.0, 1.25]) == pytest.approx(1.2 / 1.25)
    assert work.busy([0.0, 0.25], [1.0, 1.15]) == pytest.approx(1.0)
    assert work.busy([0.0, 5.0], [1.0, 3.0]) == pytest.approx(1.6 / 3.0)  # no more than the rounds have


def test_a_drafter_that_drafts_reads_prompts_however_many_share_a_round():
    users = Demand(((0, 1, 1e4), (1, 2, 1e4), (2, 3, 0.0)), 10.0, 0.0)
    for reading in (0.0, 0.05, 0.4):
        work = Workload(1.0, users, ((1.0, 1.2), (1.1, 1.4)), reading=reading)
        assert work.busy([0.0, 1.0], [1.0, 1.6]) == pytest.approx(min(1.4 / 1.6 / 2 + reading, 1.1 / 2), rel=1e-3)


def test_beside_recall_a_draft_is_worth_its_calls_or_is_made_without_them():
    for seconds in (0.1, 0.2, 0.9):
        work = Workload(1.0, ALONE, ((1.0, 1.0, 1.0),), calls=(seconds,))
        # Without calls a round gives 2 tokens, with them in half of the rounds 2.2.
        found = work.busy([0.0, 2.0, 2.0], [1.0, 2.0, 2.2], [0.0, 0.0, 0.5])
        assert found == pytest.approx(min((1 + 0.5 * seconds) / 2.2, 1 / 2.0))
    assert work.busy([0.0, 2.0], [1.0, 2.0]) == pytest.approx(1 / 2.0)


def test_a_workload_goes_through_redis_as_it_is():
    work = Workload(0.5, Demand(((0, 1, 1.5), (1, 3, 0.25)), 90.5, 0.001), ((1.0, 1.5), (2.0, 2.5)), 3.0, (0.1, 0.2))
    assert msgspec.json.decode(msgspec.json.encode(work), type=Workload) == work


def test_nothing_can_be_said_of_no_number():
    with pytest.raises(ValueError, match="of any number"):
        ALONE.seconds_a_token([])
