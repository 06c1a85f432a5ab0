"""Simulated replica, compared with queues whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from osd.simulation.arrivals import SimulatedRequest
from osd.simulation.draft_curve import draft_curve
from tests.unit.simulation.toys import PLAIN_CURVE, Toy, poisson, replica, serve


@pytest.mark.parametrize("load", [0.4, 0.6])
def test_single_slot_waits_as_an_m_d_1_queue(load):
    # Each answer takes a second: ten tokens of a tenth each, and its prompt takes no time except the first step.
    requests = poisson(load, 6_000, answer=10)
    server, ended = serve(Toy(base=0.1), requests)
    waits = [at - 1.0 - request.due for request, at in ended]
    waited = free = 0.0
    for request, wait in zip(requests, waits, strict=True):  # Lindley's recursion
        waited, free = max(free - request.due, 0.0), max(free, request.due) + 1.0
        assert wait == pytest.approx(waited, abs=1e-6)
    expected = load / (2 * (1 - load)) * 1.0  # Pollaczek and Khinchine
    mean, error = _mean(waits)
    print(f"load {load}: waited {mean:.4f}, standard error {error:.4f}, M/D/1 {expected:.4f}")
    assert abs(mean - expected) < 4 * error < 0.5 * expected
    assert server.work.waited == pytest.approx(sum(waits))
    assert server.work.busy == pytest.approx(len(requests) * 1.0)


def _mean(values, batches=20):
    """Return the mean and its standard error from the means of batches, because neighbours are correlated."""
    means = np.array(values).reshape(batches, -1).mean(1)
    return means.mean(), means.std(ddof=1) / batches**0.5


def test_shared_replica_equals_processor_sharing():
    # The duration of a step is proportional to its rows, so that all streams share the server.
    load, answer = 0.6, 11
    requests = poisson(load, 6_000, answer=answer)
    server, ended = serve(Toy(row=0.1), requests, slots=200)
    # The first token comes with the prompt, which takes no time here.
    expected = 0.1 * (answer - 1) / (1 - load)
    mean, error = _mean([at - request.due for request, at in ended])
    print(f"stayed {mean:.4f}, standard error {error:.4f}, M/D/1-PS {expected:.4f}")
    assert abs(mean - expected) < 4 * error < 0.5 * expected
    assert server.work.stayed == pytest.approx(mean * len(ended))


def test_each_request_is_answered_once_or_refused():
    chance = np.random.default_rng(3)
    due = chance.exponential(0.05, 3000).cumsum().tolist()
    lengths = chance.integers(1, 40, (3000, 2)).tolist()
    requests = [
        SimulatedRequest(at, prompt, answer, number % 2)
        for number, (at, (prompt, answer)) in enumerate(zip(due, lengths, strict=True))
    ]
    curves = (draft_curve(60, 5, 1.0), draft_curve(30, 5, 1.0))
    server, ended = serve(Toy(0.004, 0.001, 0.0005), requests, slots=4, queue=12, curves=curves, chunk=16)
    answered = [request for request, _ in ended]
    assert server.work.refused > 50
    assert len(answered) == len(set(answered)) == server.work.answered
    assert server.work.answered + server.work.refused == len(requests)
    assert server.work.tokens == sum(request.answer for request in answered)
    assert server.work.prompt_tokens == sum(request.prompt for request in answered)
    assert len(server) == 0
    assert server.by_domain.sum() <= server.work.busy <= ended[-1][1]
    assert all(at > request.due for request, at in ended)


def test_steps_times_their_lengths_are_the_tokens():
    # A step takes a second, so busy seconds are steps.
    curve = draft_curve(70, 5, 1.0)
    server, _ = serve(Toy(base=1.0), [SimulatedRequest(0.0, 1, 10_001, 0)], curves=(curve,))
    # Drafts cost nothing, so whole drafts are best.
    steps = server.work.busy - 1  # without the step of the prompt
    assert steps == pytest.approx((10_000 + curve.surplus[-1]) / curve.lengths[-1])
    assert server.work.accepted == pytest.approx(10_000 - steps)
    assert server.work.accepted / server.work.drafted == pytest.approx((curve.lengths[-1] - 1) / 5)


@pytest.mark.parametrize("certainty", [0.5, 100.0])
def test_costly_rows_prevent_drafts(certainty):
    # A row costs as much as a token, and gives less because its acceptance probability is below 1.
    requests, curves = [SimulatedRequest(0.0, 1, 100, 0)], (draft_curve(60, 5, certainty),)
    assert serve(Toy(row=1.0), requests, curves=curves)[0].work.drafted == 0
    assert serve(Toy(base=1.0, row=0.1), requests, curves=curves)[0].work.drafted > 0


def test_prompt_is_read_in_chunks_during_decoding():
    # A step takes a second, and a tenth more for each prompt token.
    costs = Toy(base=1.0, read=0.1)
    alone, ended = serve(costs, [SimulatedRequest(0.0, 40, 1, 0)], slots=2, chunk=10)
    assert ended[0][1] == pytest.approx(4 * (1 + 1.0))
    assert alone.work.reading == alone.work.busy
    both, ended = serve(costs, [SimulatedRequest(0.0, 10, 101, 0), SimulatedRequest(10.0, 40, 1, 0)], slots=2, chunk=10)
    assert ended[0][1] - 10.0 == pytest.approx(4 * 2.0)
    assert both.work.reading == pytest.approx(2 + 4 * 1.0)  # seconds that the prompts added to steps


def test_better_curve_applies_from_its_change_on():
    env, ended = simpy.Environment(), []
    server = replica(env, Toy(base=1.0), lambda request: ended.append(env.now), curves=(PLAIN_CURVE,))
    server.submit(SimulatedRequest(0.0, 1, 201, 0))
    curve = draft_curve(99, 5, 100.0)

    def better():
        yield env.timeout(101)
        server.set_curve(0, curve)

    env.process(better())
    env.run()
    assert ended[0] == pytest.approx(101 + 100 / curve.lengths[-1], abs=0.5)


def test_slowdown_multiplies_the_duration():
    env, ended = simpy.Environment(), []
    server = replica(env, Toy(base=1.0), lambda request: ended.append(env.now))
    server.submit(SimulatedRequest(0.0, 1, 10, 0))
    server.set_slowdown(1.5)
    env.run()
    assert ended == [pytest.approx(15.0)]


def test_cached_prompt_tokens_are_not_read_again():
    _, ended = serve(Toy(base=1.0, read=0.1), [SimulatedRequest(0.0, 40, 1, 0, 30)], slots=2, chunk=10)
    assert ended[0][1] == pytest.approx(2.0)
