from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.adaptation.ablate import ablate
from benchmarks.adaptation.learner import Online, copied
from benchmarks.adaptation.samples import Rehearsal
from osd.capture.trace import REJECTED, Array, Trace
from osd.learning.replay import is_held_out

DEPTH = 3
SAMPLES = ["teacher", "student", "mixed"]


def answer(trace: Trace) -> list[int]:
    return trace.completion_ids.numpy().tolist()


@pytest.fixture(scope="module", params=["eagle", "language_model"])
def drawn(experiment, stream, request):
    """Records, and the same as drafters of two sets of weights draw in them."""
    drafter = experiment.fresh(request.param)
    weights = copied(drafter)
    torch.manual_seed(1)
    others = {name: torch.randn_like(w) * w.std() if w.is_floating_point() else w for name, w in weights.items()}
    records = stream.arriving[:5]
    with Rehearsal(experiment.setup, drafter, DEPTH) as rehearsal:
        mine, theirs = rehearsal.draw(weights, records), rehearsal.draw(others, records)
        again = rehearsal.draw(weights, records)
        assert rehearsal.draw(weights, []) == []
    return records, mine, theirs, again


def test_the_text_is_the_recorded_one(drawn):
    records, mine, theirs, _ = drawn
    for record, one, other in zip(records, mine, theirs, strict=True):
        assert (one.request_id, one.domain) == (record.request_id, record.domain)
        assert one.prompt_ids == other.prompt_ids == record.prompt_ids
        assert answer(one) == answer(other) == answer(record)


def test_the_drafter_whose_weights_are_given_drafts(drawn):
    _, mine, theirs, again = drawn
    drafted = [[trace.drafted.numpy().tolist() for trace in traces] for traces in (mine, theirs, again)]
    assert drafted[0] == drafted[2] != drafted[1]


def test_the_target_scores_what_comes_after_each_rejected_token(experiment, drawn):
    _, _, theirs, _ = drawn
    model = AutoModelForCausalLM.from_pretrained(experiment.setup.directory, dtype=torch.float32)
    scored = 0
    for trace in theirs:
        for row, place in enumerate(np.flatnonzero(trace.verdict.numpy() == REJECTED).tolist()):
            tokens = [*trace.prompt_ids.numpy().tolist(), *answer(trace)[:place], int(trace.drafted.numpy()[place])]
            with torch.inference_mode():
                logp = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            ids = torch.from_numpy(trace.after_ids.numpy()[row].astype(np.int64))
            kept = torch.from_numpy(trace.after_logp.numpy()[row].astype(np.float32))
            torch.testing.assert_close(kept, logp[ids], atol=2e-2, rtol=1e-2)
            scored += 1
    assert scored > 10


def scribbled(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, drafted=Array.of(np.full(len(answer(trace)), 77, np.int32)))


@pytest.mark.parametrize("samples", SAMPLES)
def test_what_is_trained_on_is_drawn_again_and_what_the_gate_sees_never(experiment, stream, samples):
    drafter = experiment.fresh("eagle")
    recipe = replace(experiment.recipe(passes=1, interval=4, seed=0), gated=False)
    changed = {"held_out": 0.4, "min_records": 99, "samples": samples}
    recipe = replace(recipe, settings=recipe.settings.model_copy(update=changed))
    asked, added = [], []

    def draw(weights, traces):
        asked.append((copied(online.served), weights))
        return [scribbled(trace) for trace in traces]

    online = Online(drafter, recipe, experiment.offline_acceptance(drafter, stream), draw)
    add = online.learner.add
    online.learner.add = lambda trace: (added.append(trace), add(trace))[1]
    online.serve(stream.arriving)
    assert [trace.request_id for trace in added] == [trace.request_id for trace in stream.arriving]
    for trace in added:
        assert (77 in trace.drafted.numpy()) == (samples != "teacher" and not is_held_out(trace.request_id, 0.4))
    assert bool(asked) == (samples != "teacher")
    for served, weights in asked:
        assert all(torch.equal(served[name], weight) for name, weight in weights.items())


def test_samples_that_nobody_draws_are_refused(experiment, stream):
    drafter = experiment.fresh("eagle")
    recipe = experiment.recipe(passes=1, interval=4, seed=0)
    recipe = replace(recipe, settings=recipe.settings.model_copy(update={"samples": "mixed"}))
    with pytest.raises(ValueError, match="mixed samples need somebody who draws them"):
        Online(drafter, recipe, experiment.offline_acceptance(drafter, stream))


def test_the_three_sources_are_compared(experiment, stream):
    recipe = replace(experiment.recipe(passes=1, interval=8, seed=0), gated=False)
    found = ablate(experiment, stream, "eagle", recipe, "samples", [0])
    assert [variant.name for variant in found] == SAMPLES
    assert len({(variant.arriving, variant.unseen, variant.length) for variant in found}) == 3
