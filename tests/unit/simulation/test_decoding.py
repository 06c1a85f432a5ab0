"""A replica between events, against queues whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from osd.simulation.arriving import Asked
from osd.simulation.draft_curve import draft_curve
from tests.unit.simulation.toys import PLAIN_CURVE, Toy, poisson, replica, served


@pytest.mark.parametrize("load", [0.4, 0.6])
def test_one_slot_waits_as_long_as_an_m_d_1_queue(load):
    # Each answer takes a second: its prompt no time but the round of its first token, ten tokens a tenth each.
    asked = poisson(load, 6_000, answer=10)
    one, ended = served(Toy(base=0.1), asked)
    waits = [at - 1.0 - of.due for of, at in ended]
    waited = free = 0.0
    for of, wait in zip(asked, waits, strict=True):  # Lindley's recursion
        waited, free = max(free - of.due, 0.0), max(free, of.due) + 1.0
        assert wait == pytest.approx(waited, abs=1e-6)
    expected = load / (2 * (1 - load)) * 1.0  # Pollaczek and Khinchine
    found, error = _mean(waits)
    print(f"load {load}: waited {found:.4f}, standard error {error:.4f}, M/D/1 {expected:.4f}")
    assert abs(found - expected) < 4 * error < 0.5 * expected
    assert one.work.waited == pytest.approx(sum(waits))
    assert one.work.busy == pytest.approx(len(asked) * 1.0)


def _mean(values, batches=20):
    """And its standard error, by the means of batches: neighbours wait for the same ones."""
    means = np.array(values).reshape(batches, -1).mean(1)
    return means.mean(), means.std(ddof=1) / batches**0.5


def test_streams_that_share_a_replica_stay_as_long_as_in_processor_sharing():
    # A round takes as long as it has rows, so that all streams share one server.
    load, answer = 0.6, 11
    asked = poisson(load, 6_000, answer=answer)
    one, ended = served(Toy(row=0.1), asked, slots=200)
    # The first token comes with the prompt, which takes no time here.
    expected = 0.1 * (answer - 1) / (1 - load)
    found, error = _mean([at - of.due for of, at in ended])
    print(f"stayed {found:.4f}, standard error {error:.4f}, M/D/1-PS {expected:.4f}")
    assert abs(found - expected) < 4 * error < 0.5 * expected
    assert one.work.stayed == pytest.approx(found * len(ended))


def test_every_request_is_answered_once_or_refused_and_tokens_add_up():
    chance = np.random.default_rng(3)
    due = chance.exponential(0.05, 3000).cumsum().tolist()
    lengths = chance.integers(1, 40, (3000, 2)).tolist()
    asked = [
        Asked(at, prompt, answer, number % 2)
        for number, (at, (prompt, answer)) in enumerate(zip(due, lengths, strict=True))
    ]
    curves = (draft_curve(60, 5, 1.0), draft_curve(30, 5, 1.0))
    one, ended = served(Toy(0.004, 0.001, 0.0005), asked, slots=4, queue=12, curves=curves, chunk=16)
    answered = [each for each, _ in ended]
    assert one.work.refused > 50  # the case is one of them
    assert len(answered) == len(set(answered)) == one.work.answered
    assert one.work.answered + one.work.refused == len(asked)
    assert one.work.tokens == sum(each.answer for each in answered)
    assert one.work.prompt_tokens == sum(each.prompt for each in answered)
    assert len(one) == 0
    assert one.by_domain.sum() <= one.work.busy <= ended[-1][1]
    assert all(at > each.due for each, at in ended)


def test_rounds_times_what_each_gives_are_the_tokens():
    # One stream, ten tokens a round beside its prompt: a round is a second, so busy seconds are rounds.
    curve = draft_curve(70, 5, 1.0)
    one, _ = served(Toy(base=1.0), [Asked(0.0, 1, 10_001, 0)], curves=(curve,))
    # Drafts cost nothing: everything is drafted.
    rounds = one.work.busy - 1  # of the prompt
    assert rounds == pytest.approx((10_000 + curve.surplus[-1]) / curve.lengths[-1])
    assert one.work.accepted == pytest.approx(10_000 - rounds)
    assert one.work.accepted / one.work.drafted == pytest.approx((curve.lengths[-1] - 1) / 5)


@pytest.mark.parametrize("certainty", [0.5, 100.0])
def test_nothing_is_drafted_where_a_row_costs_as_much_as_it_can_give(certainty):
    # Of tokens that are accepted with a chance below one, a row gives less than it costs.
    asked, curves = [Asked(0.0, 1, 100, 0)], (draft_curve(60, 5, certainty),)
    assert served(Toy(row=1.0), asked, curves=curves)[0].work.drafted == 0
    assert served(Toy(base=1.0, row=0.1), asked, curves=curves)[0].work.drafted > 0


def test_a_prompt_is_read_beside_those_that_decode_by_the_chunk():
    # A round of a decoding stream takes a second, and a tenth more for each prompt token beside it.
    costs = Toy(base=1.0, read=0.1)
    alone, ended = served(costs, [Asked(0.0, 40, 1, 0)], slots=2, chunk=10)
    assert ended[0][1] == pytest.approx(4 * (1 + 1.0))
    assert alone.work.reading == alone.work.busy
    both, ended = served(costs, [Asked(0.0, 10, 101, 0), Asked(10.0, 40, 1, 0)], slots=2, chunk=10)
    assert ended[0][1] - 10.0 == pytest.approx(4 * 2.0)
    assert both.work.reading == pytest.approx(2 + 4 * 1.0)  # what the prompts added to rounds


def test_drafts_that_get_better_meanwhile_count_from_then_on():
    env, ended = simpy.Environment(), []
    one = replica(env, Toy(base=1.0), lambda asked: ended.append(env.now), curves=(PLAIN_CURVE,))
    one.ask(Asked(0.0, 1, 201, 0))
    curve = draft_curve(99, 5, 100.0)

    def better():
        yield env.timeout(101)
        one.drafts(0, curve)

    env.process(better())
    env.run()
    assert ended[0] == pytest.approx(101 + 100 / curve.lengths[-1], abs=0.5)


def test_a_replica_that_is_slowed_takes_so_much_longer():
    env, ended = simpy.Environment(), []
    one = replica(env, Toy(base=1.0), lambda asked: ended.append(env.now))
    one.ask(Asked(0.0, 1, 10, 0))
    one.slow(1.5)
    env.run()
    assert ended == [pytest.approx(15.0)]


def test_what_a_slot_holds_of_a_prompt_is_not_read_again():
    _, ended = served(Toy(base=1.0, read=0.1), [Asked(0.0, 40, 1, 0, 30)], slots=2, chunk=10)
    assert ended[0][1] == pytest.approx(2.0)
