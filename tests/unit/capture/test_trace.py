"""Serialised traces."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from osd.capture.trace import (
    ACCEPTED,
    NOT_DRAFTED,
    PER_TOKEN,
    REJECTED,
    Array,
    RecordFormatError,
    Trace,
    TraceError,
    decode,
    encode,
    rounded_bytes,
)
from tests.traces import small_trace


@pytest.fixture
def trace() -> Trace:
    return small_trace()


def test_decoded_trace_equals_the_encoded_trace(trace: Trace):
    again = decode(encode(trace))
    assert again == trace
    assert again.target_logp.numpy().dtype == np.float16
    np.testing.assert_array_equal(again.target_ids.numpy(), trace.target_ids.numpy())


@pytest.mark.parametrize(("values", "dtype"), [
    (np.array([[0x3F80, 0xC000]], np.uint16), "bfloat16"),  # the bits of 1.0 and -2.0
    (np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], "int32"),  # not contiguous
])  # fmt: skip
def test_unpacked_array_has_its_values_and_is_read_only(values: np.ndarray, dtype: str):
    array = Array.of(values, dtype)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array.numpy(), values)
    with pytest.raises(ValueError, match="read-only"):
        array.numpy()[0] = 1


@pytest.mark.parametrize("array", [
    Array("float16", (3,), b"1234"), Array("no_such_type", (1,), b"1"), Array("object", (1,), b"12345678"),
    Array("(1000000000,)f4", (0,), b""), Array("float16", (-1,), b"1234"), Array("float16", (-2, -1), b"1234"),
    Array("float16", (2, -1), b"1234"), Array("float16", (1 << 40, 0), b""), Array("int8", ((1 << 24) + 1, 0), b""),
    Array("float16", (0, 1 << 70), b""), Array("float16", (1 << 62, 4), b"1234"), Array("float16", (), b"12"),
    Array("float16", (1, 1, 1), b"12"), Array("float16", (1,) * 33, b"12"),
])  # fmt: skip
def test_array_with_wrong_bytes_or_dimensions_is_refused(array: Array):
    with pytest.raises(TraceError, match=r"^array of "):
        array.numpy()
    assert Array("int8", (1 << 24, 0), b"").numpy().shape == (1 << 24, 0), "the largest allowed array is accepted"


@pytest.mark.parametrize("changed", [
    {"prompt_ids": Array("int32", (1 << 40, 0), b"")}, {"prompt_ids": Array("int32", (4, 0), b"")},
    {"completion_ids": Array("int32", (3, 1), bytes(12))}, {"target_tail": Array("float16", (3, 1), bytes(6))},
    {"hidden": Array("bfloat16", (6,), bytes(12))}, {"source": Array("float32", (3,), bytes(12))}, {"segment": -1},
    {"thinking": -1}, {"segment": 1 << 40}, {"drafter_version": -4}, {"drafter_version": 1 << 62},
    {"created": math.nan}, {"temperature": -1.0}, {"temperature": math.inf}, {"top_p": math.nan},
])  # fmt: skip
def test_record_with_impossible_sizes_is_refused_cheaply(trace: Trace, changed: dict):
    data = encode(msgspec.structs.replace(trace, **changed))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", PER_TOKEN)
def test_array_with_a_wrong_number_of_rows_is_named(trace: Trace, name: str):
    short = Array.of(getattr(trace, name).numpy()[:-1])
    with pytest.raises(TraceError, match=f"^{name} "):
        decode(encode(msgspec.structs.replace(trace, **{name: short})))


def test_hidden_states_with_wrong_rows_are_refused(trace: Trace):
    with pytest.raises(TraceError, match=r"^hidden "):
        decode(encode(msgspec.structs.replace(trace, hidden=Array.of(np.zeros((5, 8), np.float16)))))


@pytest.mark.parametrize("source", [[0, 0, 0], [-1, -1, 0], [-1, 0, 1]])
def test_source_that_does_not_fit_the_drafts_is_refused(trace: Trace, source: list[int]):
    wrong = msgspec.structs.replace(trace, source=Array.of(np.array(source, np.int8)))
    with pytest.raises(TraceError, match=r"^source "):
        decode(encode(wrong))


def test_thinking_beyond_the_completion_is_refused(trace: Trace):
    assert decode(encode(msgspec.structs.replace(trace, thinking=3))).thinking == 3
    with pytest.raises(TraceError, match=r"^thinking is 4, must be at most 3, the completion tokens$"):
        decode(encode(msgspec.structs.replace(trace, thinking=4)))


def test_record_without_a_new_field_has_its_default(trace: Trace):
    fields = msgspec.msgpack.decode(encode(trace))
    del fields["thinking"]
    assert decode(msgspec.msgpack.encode(fields)) == trace


def test_drafted_token_without_distribution_keeps_its_source(trace: Trace):
    no_distribution = Array.of(np.full((3, 2), -1, np.int32))
    again = decode(encode(msgspec.structs.replace(trace, draft_ids=no_distribution, sources=("eagle", "recall"))))
    assert again.verdict.numpy().tolist() == [NOT_DRAFTED, ACCEPTED, REJECTED]
    assert [again.sources[at] for at in again.source.numpy()[1:]] == ["eagle", "eagle"]


def test_trace_with_another_format_number_is_refused(trace: Trace):
    expected = "^the record has format 2 and this build reads format 1: let only one build of osd use this Redis"
    with pytest.raises(RecordFormatError, match=expected):
        decode(encode(msgspec.structs.replace(trace, format=2)))
    fields = msgspec.msgpack.decode(encode(trace))
    del fields["format"]
    with pytest.raises(RecordFormatError, match=r"^the record has format 0 "):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"plain text", msgspec.msgpack.encode({"request_id": 3})])
def test_bytes_that_are_not_a_trace_are_refused(data: bytes):
    with pytest.raises(TraceError):
        decode(data)


def test_truncated_record_is_refused(trace: Trace):
    data = encode(trace)
    for length in range(0, len(data), 37):
        with pytest.raises(TraceError):
            decode(data[:length])


def states_trace(states: np.ndarray, **changed: Any) -> Trace:
    return small_trace(hidden=Array.of(states.astype(np.float32)), **changed)


def test_8_bit_states_have_a_bounded_error_and_half_the_size():
    chance = np.random.default_rng(0)
    states = chance.normal(size=(6, 200)) * chance.choice([1e-3, 1, 300], size=(6, 1))
    states[2, 7] = 4000.0  # one large number affects only its own group
    states[4] = 0
    trace = states_trace(states)
    rounded = decode(encode(trace.with_rounded_states()))
    loaded, given = rounded.states, trace.states
    for group in range(4):
        part = slice(64 * group, 64 * group + 64)
        largest = np.abs(given[:, part]).max(1, keepdims=True)
        assert (np.abs(loaded[:, part] - given[:, part]) <= 1.002 * largest / 254 + 1e-6).all()
    assert (loaded[4] == 0).all()
    size = len(rounded.hidden.data) + len(rounded.hidden_scale.data)
    assert size == rounded_bytes(6, 200) == 6 * (200 + 2 * 4)
    assert rounded.with_rounded_states() is rounded
    assert rounded.nbytes == trace.nbytes - 4 * 6 * 200 + size


def test_8_bit_states_preserve_nan():
    states = np.ones((6, 200))
    states[1, 70] = np.nan
    loaded = states_trace(states).with_rounded_states().states
    assert loaded is not None
    assert not np.isfinite(loaded).all()


def test_states_too_large_for_8_bits_are_unchanged():
    states = np.ones((3, 200), np.float32)
    states[2, 150] = 1e8
    trace = states_trace(states)
    assert trace.with_rounded_states() is trace


def test_trace_without_states_has_states_weight_zero():
    trace = msgspec.structs.replace(states_trace(np.ones((6, 200))), states_weight=4.0)
    assert decode(encode(trace)).states_weight == 4
    without = decode(encode(trace.without_states()))
    assert (without.hidden, without.states, without.states_weight) == (None, None, 0)
    assert without.with_rounded_states() is without
    assert without.nbytes == trace.nbytes - 4 * 6 * 200
    for weight, of in ((0.0, trace), (0.5, without), (math.nan, trace)):
        with pytest.raises(TraceError, match=f"states_weight is {weight:g}, must be at least 1, or 0 without hidden"):
            decode(encode(msgspec.structs.replace(of, states_weight=weight)))


@pytest.mark.parametrize("broken", [
    {"hidden_scale": None, "weight": 0.5},
    {"weight": float("nan")},
    {"hidden": None},
    {"hidden_scale": Array.of(np.ones((6, 3), np.float16))},
    {"hidden_scale": Array.of(np.ones((5, 4), np.float16))},
])  # fmt: skip
def test_invalid_weight_or_scale_is_refused(broken):
    rounded = states_trace(np.ones((6, 200))).with_rounded_states()
    with pytest.raises(TraceError, match=r"^(weight is|hidden_scale is)"):
        decode(encode(msgspec.structs.replace(rounded, **broken)))


def test_trace_for_recall_is_small_and_sums_to_one():
    chance = np.random.default_rng(0)
    logp = np.log(chance.dirichlet(np.ones(33), 128))
    logp = np.take_along_axis(logp, np.argsort(-logp, axis=1), 1)
    ids = np.tile(np.arange(32, dtype=np.int32), (128, 1))
    trace = small_trace(
        prompt_ids=Array.of(np.arange(128, dtype=np.int32)), completion_ids=Array.of(np.arange(128, dtype=np.int32)),
        target_ids=Array.of(ids), target_logp=Array.of(logp[:, :32].astype(np.float16)),
        target_tail=Array.of(logp[:, 32].astype(np.float16)), draft_ids=Array.of(ids),
        draft_logp=Array.of(logp[:, :32].astype(np.float16)), draft_tail=Array.of(logp[:, 32].astype(np.float16)),
        drafted=Array.of(np.full(128, 1, np.int32)), verdict=Array.of(np.full(128, REJECTED, np.int8)),
        source=Array.of(np.zeros(128, np.int8)), hidden=Array.of(np.zeros((255, 1728), np.uint16), "bfloat16"),
        thinking=5,
    )  # fmt: skip
    reduced = decode(encode(trace.for_recall("acme.code", 8)))
    assert reduced.thinking == trace.thinking == 5
    assert len(encode(reduced)) < len(encode(trace)) / 80
    assert (reduced.domain, reduced.request_id, reduced.temperature) == (
        "acme.code",
        trace.request_id,
        trace.temperature,
    )
    assert (reduced.prompt_ids, reduced.completion_ids) == (trace.prompt_ids, trace.completion_ids)
    np.testing.assert_array_equal(reduced.target_ids.numpy(), ids[:, :8])
    mass = np.exp(reduced.target_logp.numpy().astype(np.float64)).sum(1) + np.exp(
        reduced.target_tail.numpy().astype(float)
    )
    np.testing.assert_allclose(mass, 1, atol=2e-3)
    narrow = decode(encode(small_trace().for_recall("general", 8)))
    np.testing.assert_array_equal(narrow.target_logp.numpy(), small_trace().target_logp.numpy())
    np.testing.assert_array_equal(narrow.target_tail.numpy(), small_trace().target_tail.numpy())
