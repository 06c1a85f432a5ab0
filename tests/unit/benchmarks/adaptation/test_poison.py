from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.adaptation import poison
from benchmarks.adaptation.experiment import Stream
from benchmarks.adaptation.learner import copied, distill
from benchmarks.adaptation.recording import RecordingError
from benchmarks.adaptation.served import served


@pytest.fixture(scope="module")
def taught(experiment, stream):
    drafter = experiment.fresh("eagle")
    recipe = experiment.recipe(passes=20, interval=4, seed=0)
    distill(drafter, [*stream.arriving, *stream.unseen], recipe, most=60)
    return drafter


def judged(experiment, stream):
    """A recipe and a stream of which the gate sees enough to judge by."""
    recipe = experiment.recipe(passes=1, interval=4, seed=0)
    recipe = replace(recipe, settings=recipe.settings.model_copy(update={"held_out": 0.95}))
    return recipe, Stream("tiny", [*stream.arriving, *stream.unseen], [])


def test_no_corrupted_candidate_passes_the_gate(experiment, stream, taught):
    recipe, everything = judged(experiment, stream)
    before = copied(taught)
    found = poison.corrupted(experiment, everything, taught, recipe, trials=9)
    assert found == dict.fromkeys(poison.CORRUPTIONS, (0, 3))
    assert all(bool((before[name] == weight).all()) for name, weight in taught.weights().items())


def test_a_candidate_that_is_not_corrupted_is_promoted(experiment, stream, taught, monkeypatch):
    monkeypatch.setattr(poison, "CORRUPTIONS", {"nothing": lambda drafter, random: None})
    recipe, everything = judged(experiment, stream)
    assert poison.corrupted(experiment, everything, taught, recipe, trials=2) == {"nothing": (2, 2)}


def test_corrupted_candidates_are_not_tried_where_too_little_is_held_out(experiment, stream, taught):
    recipe = experiment.recipe(passes=1, interval=4, seed=0)
    with pytest.raises(RecordingError, match="not enough held-out records: "):
        poison.corrupted(
            experiment, stream, taught, recipe, trials=1 + list(poison.CORRUPTIONS).index("weights permuted")
        )


def test_poison_is_spread_evenly_and_nothing_clean_changes_place(stream):
    clean, bad = stream.arriving[:14], stream.unseen[:6]
    found = poison.mixed(clean, bad)
    assert [trace for trace in found if trace in clean] == list(clean)
    assert len(found) == 20
    for start in range(0, 20, 10):
        assert sum(trace in bad for trace in found[start : start + 10]) == 3


def test_traffic_is_poisoned_as_far_as_asked(stream):
    clean, bad = stream.unseen[:7], stream.arriving
    found = poison.traffic(clean, bad, 0.3)
    assert [trace for trace in found if trace in clean] == list(clean)
    assert len(found) == 10
    assert poison.beside(120, 0.3) == 51


def test_poisoned_prompts_are_the_same_every_time_and_all_different():
    first, again = poison.prompts(20), poison.prompts(20)
    assert first == again
    assert len({prompt.turns for prompt in first}) == 20
    assert {prompt.domain for prompt in first} == {poison.POISON}


def test_clean_traffic_is_measured_after_each_way_of_learning(experiment, stream):
    recipe = replace(experiment.recipe(passes=1, interval=8, seed=0), gated=False)
    found = poison.poison(experiment, stream, stream.unseen, "eagle", recipe)
    assert [one.way for one in found] == [poison.CLEAN, poison.ANCHORED, poison.BARE]
    assert len({one.clean.rounds for one in found}) >= 1
    assert all(one.clean.tested > 0 for one in found)
    assert any(bool((found[0].weights[name] != found[1].weights[name]).any()) for name in found[0].weights)


def test_two_ways_of_serving_take_turns_on_the_same_prompts(experiment, stream, taught):
    found = served(experiment, taught, stream.unseen[:3], 3, lambda step: None)
    assert len(found.one.speeds) == len(found.other.speeds) == 3
    assert min(found.one.speeds + found.other.speeds) > 0
    middle, least, most = found.ratio()
    assert least <= middle <= most
