"""The trace on the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import Array, Trace, TraceError, decode, encode

ROWS = ("target_ids", "target_logp", "target_tail", "draft_ids", "draft_logp", "draft_tail", "drafted", "verdict")


@pytest.fixture
def trace() -> Trace:
    generator = np.random.default_rng(0)
    ids = Array.of(generator.integers(0, 99, (3, 2), np.int32))
    logp, tail = (Array.of(generator.normal(size=shape).astype(np.float16)) for shape in ((3, 2), (3,)))
    return Trace(
        request_id="r",
        piece=0,
        domain="general",
        target="tiny",
        drafter_version=4,
        created=1.5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        prompt_ids=Array.of(np.arange(4, dtype=np.int32)),
        completion_ids=Array.of(np.arange(3, dtype=np.int32)),
        target_ids=ids,
        target_logp=logp,
        target_tail=tail,
        draft_ids=ids,
        draft_logp=logp,
        draft_tail=tail,
        drafted=Array.of(np.array([-1, 1, 2], np.int32)),
        verdict=Array.of(np.array([0, 1, 2], np.uint8)),
        hidden=Array.of(generator.integers(0, 1 << 16, (6, 8)).astype(np.uint16), "bfloat16"),
    )


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
