from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.learning import learner
from benchmarks.learning.learner import Online, copied, distill
from benchmarks.learning.offline_acceptance import total
from benchmarks.learning.ways import FROZEN, OFFLINE, ONLINE, WAYS, StreamTraining
from osd.learning.evaluation import evaluate
from osd.learning.online import empty_replay, held_out_batches
from osd.learning.replay import is_held_out


@pytest.fixture
def recipe(experiment):
    return experiment.recipe(passes=4, interval=4, seed=0)


def measured(offline, drafter, texts):
    return total([one.counts for one in offline.measure(drafter.weights(), texts)])


def test_each_record_is_drafted_for_before_anything_is_learned_from_it(experiment, stream, recipe):
    drafter = experiment.fresh("language_model")
    offline = experiment.offline_acceptance(drafter, stream)
    fresh = [one.counts for one in offline.measure(drafter.weights(), stream.arriving)]
    seen = []
    whole = offline.measure

    class Watched:
        def measure(self, weights, traces):
            seen.append((copied(drafter), [trace.request_id for trace in traces]))
            return whole(weights, traces)

    online = Online(drafter, replace(recipe, gated=False), Watched())
    counts = online.serve(stream.arriving)
    assert [ids for _, ids in seen] == [
        [trace.request_id for trace in stream.arriving[start : start + 4]] for start in range(0, 24, 4)
    ]
    assert counts[:4] == fresh[:4]
    assert online.work.published == 6
    first, last = seen[0][0], seen[-1][0]
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("kind", ["eagle", "kangaroo", "language_model"])
def test_learning_a_stream_again_and_again_raises_what_is_accepted_of_it(experiment, stream, recipe, kind):
    drafter = experiment.fresh(kind)
    stream = experiment.read_by(drafter, stream)
    offline = experiment.offline_acceptance(drafter, stream)
    # So few records that a third is held out, whatever trainer.held_out says.
    learnt = [trace for trace in stream.arriving if not is_held_out(trace.request_id, 1 / 3)]
    before = measured(offline, drafter, learnt).agreement
    online = Online(drafter, replace(recipe, passes=30, gated=False), offline)
    online.serve(stream.arriving)
    after = total([one.counts for one in offline.measure(online.in_service, learnt)]).agreement
    assert after > before + 0.05
    assert online.work.positions >= 30 * sum(len(trace.completion_ids.numpy()) for trace in learnt)
    assert online.work.cpu_seconds > 0


def test_the_gate_keeps_in_service_what_training_spoiled_does_not_replace(experiment, stream, recipe):
    drafter = experiment.fresh("eagle")
    distill(drafter, stream.arriving, recipe, most=40)
    offline = experiment.offline_acceptance(drafter, stream)
    settings = recipe.settings.model_copy(update={"learning_rate": 10.0, "steps_per_candidate": 4})
    online = Online(drafter, replace(recipe, settings=settings), offline)
    online.learner.gate = replace(online.learner.gate, min_positions=1)
    start = copied(drafter)
    online.serve(stream.arriving)
    assert online.work.rejected > 0
    assert online.work.published == 0
    assert all(torch.equal(start[name], weight) for name, weight in online.in_service.items())


def test_distilling_ends_when_it_helps_no_longer_and_keeps_the_best_weights(experiment, stream, recipe, monkeypatch):
    drafter, found = experiment.fresh("eagle"), []

    def watched(*arguments):
        figures = evaluate(*arguments)
        found.append(figures.divergence)
        return figures

    monkeypatch.setattr(learner, "evaluate", watched)
    settings = recipe.settings.model_copy(update={"learning_rate": 0.3})
    work = distill(drafter, stream.arriving, replace(recipe, settings=settings, passes=1), most=50)
    assert len(found) < 50
    assert not found[-1] < 0.99 * min(found[:-1])
    replay = empty_replay(recipe.settings, recipe.seed, min_held_out=0)
    for trace in stream.arriving:
        replay.add(trace)
    kept = evaluate(drafter, held_out_batches(replay), recipe.depth, recipe.settings.divergence)
    assert kept.divergence == pytest.approx(min(found))
    assert work.steps > 0


def test_ways_learn_and_are_measured_on_the_same_records(experiment, stream, recipe):
    training = StreamTraining(experiment, stream, "eagle", recipe, 8)
    found = {way: training.learn(way) for way in WAYS}
    for one in found.values():
        assert len(one.arriving) == len(one.spent) == len(stream.arriving)
        assert len(one.unseen) == len(stream.unseen)
    # Of everything there is ten times more to learn than of a tenth.
    assert found[OFFLINE].work.positions > 3 * found[FROZEN].work.positions
    assert total(found[OFFLINE].arriving).agreement > total(found[FROZEN].arriving).agreement
    drafter = experiment.fresh("eagle")
    first = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.arriving[:4])
    assert found[ONLINE].arriving[:4] == [one.counts for one in first]
