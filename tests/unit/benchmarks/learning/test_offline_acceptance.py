from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learning.offline_acceptance import Counts, total
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

    def rounding(self, rows, wanted, *some):
        found = forward(self, rows, wanted, *some)
        hidden = None if found.hidden is None else found.hidden.bfloat16().float()
        return Forward(found.logits, hidden, found.states)

    monkeypatch.setattr(SlotModel, "forward", rounding)


WAYS = [
    *((kind, growth) for kind in ("eagle", "language_model") for growth in GROWTHS),
    ("kangaroo", "top_k_tree"),
    ("prompt_tokens", "chain"),
    ("prompt_tokens", "top_k_tree"),
]


@pytest.mark.parametrize(("kind", "growth"), WAYS)
def test_drafting_along_recorded_text_gives_the_engines_own_counts(experiment, stream, kind, growth, rounded):
    fields, rule = GROWTHS[growth]
    changes = {"growth": GROWTH_SETTINGS[fields["kind"]](governed=False, **fields), "verification": rule}
    experiment = replace(experiment, settings=experiment.settings.model_copy(update=changes))
    policy = Policy.of(changes["growth"], rule)
    drafter = experiment.fresh(kind)
    texts = experiment.read_by(drafter, stream).unseen
    found = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), texts)
    traces = []
    with running(experiment.setup.directory, drafter=drafter, traces=traces) as client:
        for text in texts:
            prompt = text.prompt_ids.numpy().tolist()
            client.submit(text.request_id, prompt, experiment.size.tokens, capture=True, policy=policy)
        results = client.wait()
    captured = {trace.request_id: trace for trace in traces}
    for text, one in zip(texts, found, strict=True):
        counts, trace = results[text.request_id].counts, captured[text.request_id]
        assert trace.completion_ids.numpy().tolist() == text.completion_ids.numpy().tolist()
        assert (one.counts.rounds, one.counts.drafted, one.counts.accepted) == (
            counts.rounds,
            counts.drafted,
            counts.accepted,
        )
        assert one.drafted.tolist() == trace.drafted.numpy().tolist()
        assert one.verdict.tolist() == trace.verdict.numpy().tolist()
        assert one.counts.tested == sum(verdict in (ACCEPTED, REJECTED) for verdict in one.verdict.tolist())
    everything = total([one.counts for one in found])
    assert 0 < everything.tested <= everything.drafted
    assert everything.accepted == sum((one.verdict == ACCEPTED).sum() for one in found)


def test_more_texts_than_slots_are_measured_in_the_order_they_came(experiment, stream):
    drafter = experiment.fresh("language_model")
    offline = experiment.offline_acceptance(drafter, stream)
    together = offline.measure(drafter.weights(), stream.arriving)
    apart = [offline.measure(drafter.weights(), [text])[0] for text in stream.arriving[16:20]]
    assert [one.counts for one in together[16:20]] == [one.counts for one in apart]
    assert len(together) == len(stream.arriving)


def test_other_weights_draft_other_tokens_and_the_first_ones_come_back(experiment, stream):
    drafter = experiment.fresh("eagle")
    before, other = drafter.weights(), {name: weight.clone() for name, weight in drafter.weights().items()}
    for name in other:
        if name.endswith("down_proj.weight"):
            other[name] = -other[name]
    offline = experiment.offline_acceptance(drafter, stream)
    first, second, third = (offline.measure(weights, stream.unseen) for weights in (before, other, before))
    assert [one.drafted.tolist() for one in first] == [one.drafted.tolist() for one in third]
    assert [one.drafted.tolist() for one in first] != [one.drafted.tolist() for one in second]


def test_rates_of_nothing_are_those_of_plain_decoding():
    assert (Counts().acceptance, Counts().agreement, Counts().acceptance_length) == (0.0, 0.0, 1.0)
    some = Counts(2, 6, 3, 4) + Counts(2, 6, 1, 4)
    assert (some.acceptance, some.agreement, some.acceptance_length) == (4 / 12, 0.5, 2.0)


def test_a_marked_record_is_what_the_service_would_have_captured(experiment, stream):
    drafter = experiment.fresh("eagle")
    (one,) = experiment.offline_acceptance(drafter, stream).measure(drafter.weights(), stream.unseen[:1])
    marked = one.mark(stream.unseen[0])
    marked.check()
    assert marked.verdict.numpy().tolist() == one.verdict.tolist()
    assert marked.drafted.numpy().tolist() == one.drafted.tolist()
    assert marked.completion_ids == stream.unseen[0].completion_ids
