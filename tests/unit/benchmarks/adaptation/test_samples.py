from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.adaptation.ablate import ablate
from benchmarks.adaptation.learner import Online, copied
from benchmarks.adaptation.samples import SAMPLES, Student
from osd.capture.trace import ACCEPTED, Array, Trace
from osd.learning.replay import is_held_out

DEPTH = 3


def answer(trace: Trace) -> list[int]:
    return trace.completion_ids.numpy().tolist()


@pytest.fixture(scope="module", params=["eagle", "language_model"])
def drawn(lab, stream, request):
    """Weights of a drafter, records, what it answers to their prompts, and what another drafter does."""
    drafter = lab.fresh(request.param)
    weights = copied(drafter)
    torch.manual_seed(1)
    others = {name: torch.randn_like(w) * w.std() if w.is_floating_point() else w for name, w in weights.items()}
    records = stream.arriving[:5]
    with Student(lab.studio, drafter, DEPTH) as student:
        mine, theirs = student.draw(weights, records), student.draw(others, records)
        again = student.draw(weights, records)
        assert student.draw(weights, []) == []
    return records, mine, theirs, again


def test_every_draft_is_kept_whole_and_the_target_adds_one_token(drawn):
    _, mine, theirs, _ = drawn
    for trace in mine + theirs:
        best, tokens = trace.target_ids.numpy()[:, 0], trace.completion_ids.numpy()
        for place in range(len(tokens)):
            if place % (1 + DEPTH):  # the first token comes from the prompt's own forward
                assert trace.verdict.numpy()[place] == ACCEPTED or place + 1 >= len(tokens) - DEPTH
            if trace.verdict.numpy()[place] == ACCEPTED:
                assert trace.drafted.numpy()[place] == tokens[place]
            else:
                assert tokens[place] == best[place]
    accepted = np.concatenate([trace.verdict.numpy() == ACCEPTED for trace in theirs])
    refused = np.concatenate([trace.completion_ids.numpy() != trace.target_ids.numpy()[:, 0] for trace in theirs])
    assert accepted.mean() > 0.5
    assert refused[accepted].mean() > 0.2  # the target would have kept none of them


def test_an_answer_is_as_long_as_the_recorded_one_at_most_and_has_its_name(drawn):
    records, mine, _, _ = drawn
    for record, trace in zip(records, mine, strict=True):
        assert (trace.request_id, trace.domain) == (record.request_id, record.domain)
        assert trace.prompt_ids == record.prompt_ids
        assert 1 <= len(answer(trace)) <= len(answer(record))
    assert [answer(trace) for trace in mine] != [answer(record) for record in records]


def test_the_drafter_whose_weights_are_given_writes(drawn):
    _, mine, theirs, again = drawn
    assert [answer(trace) for trace in mine] != [answer(trace) for trace in theirs]
    assert [answer(trace) for trace in mine] == [answer(trace) for trace in again]


def test_the_target_scores_the_very_tokens_that_were_drafted(lab, drawn):
    _, mine, _, _ = drawn
    model = AutoModelForCausalLM.from_pretrained(lab.studio.directory, dtype=torch.float32)
    for trace in mine:
        tokens = torch.tensor([*trace.prompt_ids.numpy().tolist(), *answer(trace)])
        with torch.inference_mode():
            logp = model(tokens[None]).logits[0].float().log_softmax(-1)
        rows = logp[len(tokens) - len(answer(trace)) - 1 : -1]
        ids = torch.from_numpy(trace.target_ids.numpy().astype(np.int64))
        kept = torch.from_numpy(trace.target_logp.numpy().astype(np.float32))
        torch.testing.assert_close(kept, rows.gather(1, ids), atol=2e-2, rtol=1e-2)


def scribbled(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, drafted=Array.of(np.full(len(answer(trace)), 77, np.int32)))


@pytest.mark.parametrize("samples", SAMPLES)
def test_what_is_trained_on_is_replaced_and_what_the_gate_sees_never(lab, stream, samples):
    drafter = lab.fresh("eagle")
    recipe = replace(lab.recipe(passes=1, interval=4, seed=0), gated=False, samples=samples)
    recipe = replace(recipe, settings=recipe.settings.model_copy(update={"held_out": 0.4, "min_records": 99}))
    asked, added = [], []

    def draw(weights, traces):
        asked.append((copied(online.served), weights))
        return [scribbled(trace) for trace in traces]

    online = Online(drafter, recipe, lab.ruler(drafter, stream), draw)
    add = online._replay.add
    online._replay.add = lambda trace: (added.append(trace), add(trace))[1]
    online.serve(stream.arriving)
    assert [trace.request_id for trace in added] == [trace.request_id for trace in stream.arriving]
    every = {"teacher": 99, "student": 1, "mixed": 2}[samples]
    for index, trace in enumerate(added):
        theirs = 77 in trace.drafted.numpy()
        assert theirs == (not is_held_out(trace.request_id, 0.4) and every < 99 and index % every == 0)
    assert bool(asked) == (samples != "teacher")
    for served, weights in asked:
        assert all(torch.equal(served[name], weight) for name, weight in weights.items())


def test_samples_that_nobody_draws_are_refused(lab, stream):
    drafter = lab.fresh("eagle")
    recipe = replace(lab.recipe(passes=1, interval=4, seed=0), samples="mixed")
    with pytest.raises(ValueError, match="mixed samples need somebody who draws them"):
        Online(drafter, recipe, lab.ruler(drafter, stream))


def test_the_three_sources_are_compared(lab, stream):
    recipe = replace(lab.recipe(passes=1, interval=8, seed=0), gated=False)
    found = ablate(lab, stream, "eagle", recipe, "samples", [0])
    assert [variant.name for variant in found] == list(SAMPLES)
    assert len({(variant.arriving, variant.unseen, variant.length) for variant in found}) > 1
