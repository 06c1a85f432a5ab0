from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.learning import learner
from benchmarks.learning.learner import OnlineService, copy_weights, distill
from benchmarks.learning.offline_acceptance import sum_counts
from benchmarks.learning.ways import FROZEN, OFFLINE, ONLINE, WAYS, StreamTraining
from osd.learning.evaluation import evaluate
from osd.learning.online import empty_replay, held_out_batches
from osd.learning.replay import is_held_out


@pytest.fixture
def recipe(experiment):
    return experiment.recipe(passes=4, interval=4, seed=0)


def measured(offline, drafter, texts):
    return sum_counts([text.counts for text in offline.measure(drafter.weights(), texts)])


def test_record_is_drafted_for_before_training_on_it(experiment, stream, recipe):
    drafter = experiment.new_drafter("language_model")
    offline = experiment.offline_acceptance(drafter, stream)
    fresh = [text.counts for text in offline.measure(drafter.weights(), stream.arriving)]
    calls = []
    measure = offline.measure

    class Watched:
        def measure(self, weights, traces):
            calls.append((copy_weights(drafter), [trace.request_id for trace in traces]))
            return measure(weights, traces)

    online = OnlineService(drafter, replace(recipe, gated=False), Watched())
    counts = online.serve(stream.arriving)
    assert [ids for _, ids in calls] == [
        [trace.request_id for trace in stream.arriving[start : start + 4]] for start in range(0, 24, 4)
    ]
    assert counts[:4] == fresh[:4]
    assert online.work.published == 6
    first, last = calls[0][0], calls[-1][0]
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("kind", ["eagle", "kangaroo", "language_model"])
def test_training_raises_acceptance_on_its_stream(experiment, stream, recipe, kind):
    drafter = experiment.new_drafter(kind)
    stream = experiment.stream_for(drafter, stream)
    offline = experiment.offline_acceptance(drafter, stream)
    # With so few records a third is held out, independent of trainer.held_out.
    learnt = [trace for trace in stream.arriving if not is_held_out(trace.request_id, 1 / 3)]
    before = measured(offline, drafter, learnt).agreement
    online = OnlineService(drafter, replace(recipe, passes=30, gated=False), offline)
    online.serve(stream.arriving)
    after = sum_counts([text.counts for text in offline.measure(online.in_service, learnt)]).agreement
    assert after > before + 0.05
    assert online.work.positions >= 30 * sum(len(trace.completion_ids.numpy()) for trace in learnt)
    assert online.work.cpu_seconds > 0


def test_gate_rejects_weights_of_failed_training(experiment, stream, recipe):
    drafter = experiment.new_drafter("eagle")
    distill(drafter, stream.arriving, recipe, max_passes=40)
    offline = experiment.offline_acceptance(drafter, stream)
    settings = recipe.settings.model_copy(update={"learning_rate": 10.0, "steps_per_candidate": 4})
    online = OnlineService(drafter, replace(recipe, settings=settings), offline)
    online.learner.gate = replace(online.learner.gate, min_positions=1)
    start = copy_weights(drafter)
    online.serve(stream.arriving)
    assert online.work.rejected > 0
    assert online.work.published == 0
    assert all(torch.equal(start[name], weight) for name, weight in online.in_service.items())


def test_distillation_stops_without_gain_at_best_weights(experiment, stream, recipe, monkeypatch):
    drafter, divergences = experiment.new_drafter("eagle"), []

    def watched(*arguments):
        figures = evaluate(*arguments)
        divergences.append(figures.divergence)
        return figures

    monkeypatch.setattr(learner, "evaluate", watched)
    settings = recipe.settings.model_copy(update={"learning_rate": 0.3})
    work = distill(drafter, stream.arriving, replace(recipe, settings=settings, passes=1), max_passes=50)
    assert len(divergences) < 50
    assert not divergences[-1] < 0.99 * min(divergences[:-1])
    replay = empty_replay(recipe.settings, recipe.seed, min_held_out=0)
    for trace in stream.arriving:
        replay.add(trace)
    kept = evaluate(drafter, held_out_batches(replay), recipe.depth, recipe.settings.divergence)
    assert kept.divergence == pytest.approx(min(divergences))
    assert work.steps > 0


def test_ways_train_and_measure_on_the_same_records(experiment, stream, recipe):
    training = StreamTraining(experiment, stream, "eagle", recipe, 8)
    trained = {way: training.learn(way) for way in WAYS}
    for result in trained.values():
        assert len(result.arriving) == len(result.spent) == len(stream.arriving)
        assert len(result.unseen) == len(stream.unseen)
    # The whole stream is ten times as large as its first tenth.
    assert trained[OFFLINE].work.positions > 3 * trained[FROZEN].work.positions
    assert sum_counts(trained[OFFLINE].arriving).agreement > sum_counts(trained[FROZEN].arriving).agreement
    drafter = experiment.new_drafter("eagle")
    first = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.arriving[:4])
    assert trained[ONLINE].arriving[:4] == [result.counts for result in first]
