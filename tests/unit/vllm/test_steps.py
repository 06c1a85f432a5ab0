"""Encoding of step records."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import Array
from osd.vllm.steps import StepError, decode, encode, shared
from tests.unit.vllm.step_records import admission, step_record

ROWS = [("a", 0, 5, [7], [-1], 0), ("b", 9, 3, [1, 2, 3], [1, 2, -1], 2), ("c", 4, 6, [], [], 0)]


def record(**fields):
    return step_record(ROWS, version=3, begun=[admission("a")], ended=["z"], **fields)


def int32(*values):
    return Array.of(np.array(values, np.int32))


def int8_states(groups=2):
    scale = Array.of(np.ones((14, groups), np.float16))
    return {"states": Array.of(np.ones((14, 96), np.int8)), "states_scale": scale}


@pytest.mark.parametrize("fields", [{}, int8_states()])
def test_decoding_restores_a_record(fields):
    sent = record(**fields)
    restored = decode(b"".join(encode(sent)))
    assert msgspec.msgpack.encode(restored) == msgspec.msgpack.encode(sent)


def test_record_without_requests_is_restored():
    restored = decode(b"".join(encode(step_record(ended=["a"], states=None))))
    assert (restored.ended, restored.keys, restored.states) == (["a"], [], None)


def test_shared_array_is_encoded_without_a_copy():
    states = np.ones((14, 96), np.uint16)
    parts = encode(record(states=shared(states, "bfloat16")))
    states[:] = 2
    assert (decode(b"".join(parts)).states.numpy() == 2).all()


@pytest.mark.parametrize("empty", [np.empty((0, 4), np.int32), np.empty(0, np.float16)])
def test_shared_array_may_be_empty(empty):
    assert shared(empty).numpy().shape == empty.shape


def test_bytes_that_are_not_a_record_are_refused():
    data = b"".join(encode(record()))
    header = msgspec.msgpack.decode(encode(record())[1])
    header[-1].append(None)
    larger = msgspec.msgpack.encode(header)
    other = len(larger).to_bytes(4, "little") + larger + b"".join(encode(record())[2:])
    for damaged in (b"", other, data[:3], data[:40], data[:-1], data + b"0", b"\xff" * 100):
        with pytest.raises(StepError):
            decode(damaged)


@pytest.mark.parametrize(("fields", "message"), [
    ({"starts": int32(0, 9)}, "starts"),
    ({"starts": None}, "starts is absent"),
    ({"starts": int32(0, -9, 4)}, "starts"),
    ({"sampled": int32(1, 3, 1)}, "tokens"),
    ({"sampled": int32(1, 4, -1)}, "sampled"),
    ({"accepted": int32(0, 4, 0)}, "accepted"),
    ({"state_rows": int32(5, 2, 6)}, "state_rows"),
    ({"state_rows": int32(5, 3, 7)}, "states"),
    ({"states": None}, "state_rows"),
    ({"states": Array.of(np.ones((14, 96), np.float32))}, "states"),
    ({"states": Array.of(np.ones((14, 96), np.int8))}, "states_scale"),
    (int8_states(groups=1), "states_scale"),
    ({"tokens": Array.of(np.zeros(4, np.int64))}, "tokens"),
    ({"target_logp": Array.of(np.zeros((4, 3), np.float16))}, "target_logp"),
    ({"target_tail": Array.of(np.zeros(3, np.float16))}, "target_tail"),
    ({"target_tail": Array.of(np.zeros(4, "<M8[s]"))}, "not allowed"),
    ({"target_tail": Array("nonsense", (4,), b"")}, "nonsense"),
    ({"begun": [admission(computed=5)]}, "computed"),
    ({"begun": [admission(prompt_ids=Array.of(np.zeros(5, np.int64)))]}, "prompt_ids"),
    ({"begun": [admission(prompt_ids=Array("int32", (5,), b""))]}, "prompt_ids"),
    ({"begun": [admission(weight=0.5)]}, "weight"),
    ({"begun": [admission(states_weight=float("nan"))]}, "states_weight"),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(fields, message):
    damaged = msgspec.structs.replace(record(), **fields)
    with pytest.raises(StepError, match=message):
        decode(b"".join(encode(damaged)))
