from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learning.offline_acceptance import DraftCounts, sum_counts
from osd.capture.trace import ACCEPTED, REJECTED
from osd.config import GROWTH_SETTINGS
from osd.engine.policy import Policy
from osd.runtime.decoder import Forward
from osd.runtime.model import SlotModel
from tests.unit.engine.harness import running

GROWTHS = {
    "chain": ({"kind": "chain", "depth": 3}, "chain"),
    "confidence": ({"kind": "confidence", "depth": 4, "eta": 0.05}, "chain"),
    "heuristic": ({"kind": "heuristic", "depth": 5}, "chain"),
    "top_k_tree": ({"kind": "top_k_tree", "budget": 8, "depth": 3, "top_k": 3}, "naive"),
}


@pytest.fixture
def rounded(monkeypatch):
    """Targets whose hidden states have the precision of a trace."""
    forward = SlotModel.forward

    def rounding(self, rows, selected, *args):
        result = forward(self, rows, selected, *args)
        hidden = None if result.hidden is None else result.hidden.bfloat16().float()
        return Forward(result.logits, hidden, result.states)

    monkeypatch.setattr(SlotModel, "forward", rounding)


WAYS = [
    *((kind, growth) for kind in ("eagle", "language_model") for growth in GROWTHS),
    ("kangaroo", "top_k_tree"),
    ("prompt_tokens", "chain"),
    ("prompt_tokens", "top_k_tree"),
]


@pytest.mark.parametrize(("kind", "growth"), WAYS)
def test_offline_drafts_equal_the_engines_drafts(experiment, stream, kind, growth, rounded):
    fields, rule = GROWTHS[growth]
    changes = {"growth": GROWTH_SETTINGS[fields["kind"]](governed=False, **fields), "verification": rule}
    experiment = replace(experiment, settings=experiment.settings.model_copy(update=changes))
    policy = Policy.of(changes["growth"], rule)
    drafter = experiment.new_drafter(kind)
    texts = experiment.stream_for(drafter, stream).unseen
    drafts = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), texts)
    traces = []
    with running(experiment.setup.directory, drafter=drafter, traces=traces) as client:
        for text in texts:
            prompt = text.prompt_ids.numpy().tolist()
            client.submit(text.request_id, prompt, experiment.size.tokens, capture=True, policy=policy)
        results = client.wait()
    captured = {trace.request_id: trace for trace in traces}
    for text, draft in zip(texts, drafts, strict=True):
        counts, trace = results[text.request_id].counts, captured[text.request_id]
        assert trace.completion_ids.numpy().tolist() == text.completion_ids.numpy().tolist()
        assert (draft.counts.rounds, draft.counts.drafted, draft.counts.accepted) == (
            counts.rounds,
            counts.drafted,
            counts.accepted,
        )
        assert draft.drafted.tolist() == trace.drafted.numpy().tolist()
        assert draft.verdict.tolist() == trace.verdict.numpy().tolist()
        assert draft.counts.tested == sum(verdict in (ACCEPTED, REJECTED) for verdict in draft.verdict.tolist())
    sums = sum_counts([draft.counts for draft in drafts])
    assert 0 < sums.tested <= sums.drafted
    assert sums.accepted == sum((draft.verdict == ACCEPTED).sum() for draft in drafts)


def test_more_texts_than_slots_keep_their_order(experiment, stream):
    drafter = experiment.new_drafter("language_model")
    offline = experiment.offline_acceptance(drafter, stream)
    together = offline.measure(drafter.weights(), stream.arriving)
    separate = [offline.measure(drafter.weights(), [text])[0] for text in stream.arriving[16:20]]
    assert [draft.counts for draft in together[16:20]] == [draft.counts for draft in separate]
    assert len(together) == len(stream.arriving)


def test_loaded_weights_change_the_drafts(experiment, stream):
    drafter = experiment.new_drafter("eagle")
    before, changed = drafter.weights(), {name: weight.clone() for name, weight in drafter.weights().items()}
    for name in changed:
        if name.endswith("down_proj.weight"):
            changed[name] = -changed[name]
    offline = experiment.offline_acceptance(drafter, stream)
    first, second, third = (offline.measure(weights, stream.unseen) for weights in (before, changed, before))
    assert [draft.drafted.tolist() for draft in first] == [draft.drafted.tolist() for draft in third]
    assert [draft.drafted.tolist() for draft in first] != [draft.drafted.tolist() for draft in second]


def test_rates_without_drafts_match_plain_decoding():
    assert (DraftCounts().acceptance, DraftCounts().agreement, DraftCounts().acceptance_length) == (0.0, 0.0, 1.0)
    counts = DraftCounts(2, 6, 3, 4) + DraftCounts(2, 6, 1, 4)
    assert (counts.acceptance, counts.agreement, counts.acceptance_length) == (4 / 12, 0.5, 2.0)


def test_marked_record_equals_a_captured_record(experiment, stream):
    drafter = experiment.new_drafter("eagle")
    (draft,) = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.unseen[:1])
    marked = draft.mark(stream.unseen[0])
    marked.check()
    assert marked.verdict.numpy().tolist() == draft.verdict.tolist()
    assert marked.drafted.numpy().tolist() == draft.drafted.tolist()
    assert marked.completion_ids == stream.unseen[0].completion_ids
