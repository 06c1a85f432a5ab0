"""Choice of the requests whose traces vLLM captures."""

from __future__ import annotations

import pytest

from osd.vllm.admission import Admissions, RecordSizes
from tests.clocks import Clock
from tests.unit.vllm.steps import request

ALLOWED = {"osd_store": True}


def admissions(rate: float | None = None, states_weight: float = 1.0, clock: Clock | None = None) -> Admissions:
    sizes = RecordSizes(32, 192, int8=True)
    return Admissions("general", sizes, lambda domain, name: states_weight, rate, clock or Clock())


def test_admission_has_the_fields_of_the_request():
    made = admissions()
    extra = {"osd_store": True, "osd_id": "chatcmpl-x-1", "osd_domain": "sql", "osd_place": 0, "osd_choices": 1}
    admission = made.admit(request("chatcmpl-x-1-0a1b2c3d", prompt=5, computed=2, extra_args=extra))
    assert (admission.request_id, admission.key) == ("chatcmpl-x-1-0", "chatcmpl-x-1-0a1b2c3d")
    assert admission.prompt_ids.numpy().tolist() == [0, 1, 2, 3, 4]
    assert (admission.computed, admission.max_tokens, admission.stop_ids) == (2, 16, [2, 7])
    assert (admission.temperature, admission.top_k, admission.top_p) == (0.7, 0, 0.9)
    assert (admission.domain, admission.completes) == ("sql", False)
    assert (admission.weight, admission.states_weight) == (1.0, 1.0)
    assert made.domains == ("general", "sql")


def test_end_token_does_not_end_an_answer_with_ignore_eos():
    admission = admissions().admit(request("a", eos_token_id=None))
    assert admission.stop_ids == [7]


@pytest.mark.parametrize(("key", "extra", "expected"), [
    ("chatcmpl-x-abc", {"osd_id": "chatcmpl-x"}, "chatcmpl-x-0"),
    ("2_chatcmpl-x-abc", {"osd_id": "chatcmpl-x", "osd_choices": 3}, "chatcmpl-x-2"),
    ("1_cmpl-x-2-abc", {"osd_id": "cmpl-x", "osd_place": 6, "osd_choices": 3}, "cmpl-x-7"),
    ("0_odd-abc", {"osd_id": "0_odd"}, "0_odd-0"),
])  # fmt: skip
def test_request_id_is_a_choice_of_the_response(key, extra, expected):
    admission = admissions().admit(request(key, extra_args=ALLOWED | extra))
    assert admission.request_id == expected
    assert admission.completes == expected.startswith(("cmpl", "0_odd"))


@pytest.mark.parametrize(("reason", "fields"), [
    ("store", {"extra_args": None}),
    ("store", {"extra_args": {"osd_store": False}}),
    ("store", {"extra_args": {"osd_store": 1}}),
    ("lora", {"lora_request": object()}),
    ("multimodal", {"mm_features": [object()]}),
    ("embeddings", {"prompt_embeds": object()}),
    ("embeddings", {"prompt_token_ids": None}),
    ("pooling", {"sampling_params": None}),
    ("domain", {"extra_args": ALLOWED | {"osd_domain": "../x"}}),
    ("domain", {"extra_args": ALLOWED | {"osd_domain": "tenant.sql"}}),
])  # fmt: skip
def test_request_is_skipped_and_counted_by_reason(reason, fields):
    made = admissions()
    assert made.admit(request("a", **fields)) is None
    assert made.skipped == {reason: 1}
    assert made.admitted == 0


def test_budget_thins_requests_and_weights_the_rest():
    clock = Clock()
    made, kept = admissions(rate=2_000_000, clock=clock), []
    for n in range(4000):
        kept.append(made.admit(request(f"r{n}", prompt=500, max_tokens=100)))
        clock.now += 0.01
    weights = [admission.weight for admission in kept if admission is not None]
    assert 400 < len(weights) < 1600
    assert sum(weights) == pytest.approx(4000, rel=0.15)
    assert made.skipped["budget"] == 4000 - len(weights)
    assert made.demand > 2_000_000


def test_request_without_states_takes_less_of_the_budget():
    sizes = RecordSizes(32, 192, int8=True)
    assert sizes.trace(100, 10, has_states=True) == 10 * (6 * 32 + 32) + 110 * (192 + 6)
    assert RecordSizes(32, 192, int8=False).trace(100, 10, has_states=True) == 10 * (6 * 32 + 32) + 110 * 384
    assert sizes.trace(100, 10, has_states=False) == 10 * (6 * 32 + 32)
    demands = []
    for weight in (1.0, 0.0):
        made = admissions(rate=1e9, states_weight=weight)
        made.admit(request("a", prompt=500))
        demands.append(made.demand)
    assert demands[0] > 5 * demands[1]


def test_unknown_domains_of_clients_do_not_fill_memory():
    made = admissions()
    for n in range(100):
        assert made.admit(request(f"r{n}", extra_args=ALLOWED | {"osd_domain": f"d{n}"}))
    assert len(made.domains) == 64
