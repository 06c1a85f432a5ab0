"""The trace on the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import Array, Trace, TraceError, decode, encode
from tests.traces import small_trace

ROWS = ("target_ids", "target_logp", "target_tail", "draft_ids", "draft_logp", "draft_tail", "drafted", "verdict")


@pytest.fixture
def trace() -> Trace:
    return small_trace()


def test_decoded_trace_equals_the_encoded_one(trace: Trace):
    again = decode(encode(trace))
    assert again == trace
    assert again.target_logp.numpy().dtype == np.float16
    np.testing.assert_array_equal(again.target_ids.numpy(), trace.target_ids.numpy())


def test_trace_without_hidden_states_survives(trace: Trace):
    assert decode(encode(msgspec.structs.replace(trace, hidden=None))).hidden is None


def test_bfloat16_travels_as_its_bits():
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1.0, -2.0
    array = Array.of(bits, "bfloat16")
    assert array.dtype == "bfloat16"
    np.testing.assert_array_equal(array.numpy(), bits)


def test_array_that_is_not_contiguous_keeps_its_values():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(Array.of(values).numpy(), values)


def test_unpacked_array_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        Array.of(np.zeros(2)).numpy()[0] = 1


@pytest.mark.parametrize("array", [Array("float16", (3,), b"1234"), Array("no_such_type", (1,), b"1")])
def test_array_whose_bytes_do_not_fit_is_refused(array: Array):
    with pytest.raises(TraceError):
        array.numpy()


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_match_the_completion_are_refused_by_name(trace: Trace, name: str):
    short = Array.of(getattr(trace, name).numpy()[:-1])
    with pytest.raises(TraceError, match=f"^{name} "):
        decode(encode(msgspec.structs.replace(trace, **{name: short})))


def test_hidden_states_that_do_not_match_the_tokens_are_refused(trace: Trace):
    with pytest.raises(TraceError, match=r"^hidden "):
        decode(encode(msgspec.structs.replace(trace, hidden=Array.of(np.zeros((5, 8), np.float16)))))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"plain text", msgspec.msgpack.encode({"request_id": 3})])
def test_bytes_that_are_no_trace_are_refused(data: bytes):
    with pytest.raises(TraceError):
        decode(data)


def test_cut_record_is_refused(trace: Trace):
    data = encode(trace)
    for length in range(0, len(data), 37):
        with pytest.raises(TraceError):
            decode(data[:length])
