"""Records of steps from the tensors of a model runner, compared with a computation row by row."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import Array
from osd.vllm.recorder import MAX_ERRORS, CapturePlan, StepResult, rounded, spans, top_of
from osd.vllm.steps import decode, encode
from tests.unit.learning.toys import make_trace
from tests.unit.vllm.steps import K, recorder, request, scheduled

NONE = np.zeros(0, np.int64)


def finish(made, plan: CapturePlan, tokens: int = 1) -> None:
    """Finish a step in which each captured request reads one token and gets one, without states."""
    count = len(plan.keys)
    ids = np.zeros((len(plan.logit_rows), K), np.int32)
    half = ids.astype(np.float16)
    sampled = np.full(count, tokens, np.int64)
    empty = np.zeros(count * tokens, np.int32)
    made.finish(plan, StepResult(np.zeros(count), sampled, empty, NONE, ids, half, half[:, 0], None, None))


def test_spans_are_the_ranges_one_after_the_other():
    assert spans(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert spans(NONE, NONE).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_of_chosen_rows_has_exact_log_probabilities(dtype):
    logits = (4 * torch.randn(300, 50, generator=torch.Generator().manual_seed(1))).to(dtype)
    rows = np.arange(1, 299, 2)
    top = top_of(logits, rows, 5)
    exact = logits[rows].float().log_softmax(-1)
    values = exact.topk(5).values
    torch.testing.assert_close(top.logp.float(), values, atol=1e-4, rtol=6e-4)  # half precision
    torch.testing.assert_close(exact.gather(1, top.ids.long()), values)
    torch.testing.assert_close(top.tail.float(), (1 - values.exp().sum(-1)).log(), atol=0.02, rtol=0)


def test_states_are_rounded_exactly_as_in_a_trace():
    generator = torch.Generator().manual_seed(2)
    states = (torch.randn(40, 130, generator=generator) * torch.logspace(-6, 3, 40).unsqueeze(1)).bfloat16()
    states[3] = 0
    states[5, 7] = float("nan")
    integers, scale = rounded(states)
    bits = Array.of(states.view(torch.uint16).numpy(), "bfloat16")
    trace = msgspec.structs.replace(make_trace("r"), hidden=bits).with_rounded_states()
    np.testing.assert_array_equal(scale.numpy(), trace.hidden_scale.numpy())
    finite = [row for row in range(40) if row != 5]
    np.testing.assert_array_equal(integers.numpy()[finite], trace.hidden.numpy()[finite])


def test_state_beyond_8_bits_is_an_error_that_names_the_setting():
    made, records = recorder(int8=True)
    made.schedule(scheduled([request("a")]))
    plan = made.plan(["a"], [1], None)
    integers, scale = (t.numpy() for t in rounded(torch.full((1, 130), 3e7).bfloat16()))
    ids = np.zeros((1, K), np.int32)
    half = ids.astype(np.float16)
    one = np.ones(1, np.int64)
    result = StepResult(one, one, one, NONE, ids, half, half[:, 0], integers, scale)
    with pytest.raises(ValueError, match=r"set OSD_CAPTURE__STATES=full$"):
        made.finish(plan, result)
    assert not records


def test_requests_begin_once_and_end_once():
    made, records = recorder()
    made.schedule(scheduled([request("a"), request("b", extra_args={})]))
    plan = made.plan(["b", "a"], [4, 4], None)
    assert [admission.key for admission in plan.begun] == ["a"]
    assert plan.keys == ["a"]
    made.schedule(scheduled([request("a"), request("b", extra_args={})]))  # preempted, and scheduled again
    plan = made.plan(["a", "b"], [4, 4], None)
    assert plan.begun == []
    assert made.admissions.skipped == {"store": 1}
    made.schedule(scheduled([], ended=("a", "b")))
    assert made.plan(["c"], [1], None) is None
    assert [(record.ended, record.keys) for record in records] == [(["a"], [])]
    made.schedule(scheduled([request("a")], tokens=1))
    assert made.admissions.admitted == 2


def test_end_without_a_further_step_is_recorded():
    made, records = recorder()
    made.schedule(scheduled([request("a")]))
    made.plan(["a"], [4], None)
    made.schedule(scheduled([], ended=("a",), tokens=0))
    (record,) = records
    assert record.ended == ["a"]
    assert decode(b"".join(encode(record))).target_ids.shape == (0, K)


def test_draft_has_the_version_that_was_loaded_when_it_was_made():
    made, records = recorder()
    made.schedule(scheduled([request("a")]))
    for version in (3, 8, 8):
        made.version = version
        plan = made.plan(["a"], [1], None)
        finish(made, plan)
    assert [record.version for record in records] == [3, 3, 8]


def test_draft_behind_a_grammars_limit_counts_as_not_drafted():
    made, records = recorder()
    made.schedule(scheduled([request("a"), request("b")]))
    plan = made.plan(["a", "b"], [3, 3], [2, 2], {"a": 1})
    assert plan.testable.tolist() == [1, 2]
    ids = np.zeros((6, K), np.int32)
    half = ids.astype(np.float16)
    result = StepResult(
        np.zeros(2), np.array([2, 2]), np.arange(4), np.array([10, 11, 12, 13]), ids, half, half[:, 0], None, None
    )
    made.finish(plan, result)
    assert records[0].drafted.numpy().tolist() == [10, -1, 12, 13]


def test_guard_switches_off_after_ten_failed_steps(caplog):
    made, _ = recorder()
    for n in range(2 * MAX_ERRORS):
        if n == MAX_ERRORS - 1:
            made.guard.succeeded()
        with made.guard:
            raise OSError("no\nspace")
        assert made.guard.is_off == (n >= 2 * MAX_ERRORS - 2)
    assert made.guard.errors == 2 * MAX_ERRORS
    (line,) = caplog.messages
    assert line.startswith("capture is off until the next start, because 10 steps in a row failed")
    assert line.endswith("OSError: no space")


def test_guard_lets_the_end_of_the_process_pass():
    made, _ = recorder()
    with pytest.raises(KeyboardInterrupt), made.guard:
        raise KeyboardInterrupt
    assert made.guard.errors == 0
