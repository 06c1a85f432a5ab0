"""Traces that are assembled from step records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, decode, encode
from osd.engine.request import Request, SamplingParams
from osd.engine.trace_builder import TraceBuilder
from osd.runtime.top import Top
from osd.vllm.assembly import SILENT_SECONDS, TraceAssembly, TraceOrigin
from osd.vllm.steps import decode as decode_step
from osd.vllm.steps import encode as encode_step
from tests.traces import small_trace
from tests.unit.vllm.step_records import WIDTH, K, admission, step_record

SEGMENT, STOP = 16, 2
ORIGIN = TraceOrigin("tiny@abc", "code", "eagle")


@dataclass
class Event:
    """Rows of a request in one step: the tokens read from ``start`` on, and the new tokens with their drafts."""

    start: int
    read: int
    tokens: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    accepted: int = 0


class Answer:
    """Request with random steps: chunks of its prompt, drafts, and preemptions that compute positions again."""

    def __init__(self, chance, key, states_weight=1.0):
        self.chance, self.key = chance, key
        prompt, self.length = int(chance.integers(1, 40)), int(chance.integers(1, 70))
        computed = int(chance.integers(0, prompt))
        # A later token may follow in the step of the stop token, or of the last token that is allowed.
        self.is_stopped = bool(chance.integers(2))
        text = chance.integers(3, 1000, prompt + self.length + 4).astype(np.int32)
        if self.is_stopped:
            text[prompt + self.length - 1] = STOP
        self.text, size = text, len(text)
        self.states = chance.integers(0, 1 << 14, (size, WIDTH)).astype(np.uint16)
        self.ids = chance.integers(0, 1000, (size, K)).astype(np.int32)
        logp = np.log(chance.dirichlet(np.ones(K + 1), size)).astype(np.float16)
        self.logp, self.tail = logp[:, :K], logp[:, K]
        self.admission = admission(
            key, prompt_ids=Array.of(text[:prompt]), computed=computed, temperature=0.5, top_k=7, top_p=0.75,
            completes=bool(chance.integers(2)), stop_ids=[1, STOP], max_tokens=1000 if self.is_stopped else self.length,
            states_weight=states_weight,
        )  # fmt: skip
        self.begun, self.events = False, self._events(prompt, computed)
        first = computed if states_weight else 0
        request = Request(
            self.admission.request_id, tuple(text[first:prompt].tolist()), self.admission.max_tokens,
            SamplingParams(temperature=0.5, top_k=7, top_p=0.75), completes=self.admission.completes,
        )  # fmt: skip
        self.builder = TraceBuilder(request, ORIGIN.target, SEGMENT, states_weight)
        self.version, self.built, self.fed = 0, [], computed
        self.end = prompt + self.length

    def _events(self, prompt, computed):
        yield from self._chunks(computed, prompt)
        at = prompt + 1  # known tokens
        while at < prompt + self.length:
            if self.chance.random() < 0.1:
                yield from self._chunks(int(self.chance.integers(0, at)), at)
                at += 1
                continue
            depth = int(self.chance.integers(0, 4))
            accepted = int(self.chance.integers(0, depth + 1))
            tokens = self.text[at : at + accepted + 1].tolist()
            drafted = [*tokens[:accepted], *([tokens[accepted] + 1] if accepted < depth else [-1])]
            yield Event(at - 1, accepted + 1, tuple(tokens), tuple(drafted), accepted)
            at += accepted + 1

    def _chunks(self, start, end):
        """Yield the rows of the positions ``start`` to ``end`` - 1, the last with a new token."""
        while self.chance.random() < 0.5 and end - start > 1:
            size = int(self.chance.integers(1, end - start))
            yield Event(start, size)
            start += size
        yield Event(start, end - start, (int(self.text[end]),), (-1,))

    def expect(self, event, version):
        """Build the expected traces of an event."""
        if version != self.version:
            self._build()
            self.version = version
        end = event.start + event.read
        if end > self.fed and self.builder.states_weight:
            states = self.states[self.fed : end]
            self.builder.feed(torch.from_numpy(states.copy()).view(torch.bfloat16))
            self.fed = end
        at = end - len(event.tokens) + 1
        tokens = event.tokens[: self.end - at]
        rows = slice(at, at + len(tokens))
        top = Top(*(torch.from_numpy(values[rows]) for values in (self.ids, self.logp, self.tail)))
        drafted = [(token, "eagle") for token in event.drafted[: len(tokens)] if token >= 0]
        self.builder.add(list(tokens), top, None, drafted, event.accepted)
        while self.builder.full():
            self._build()

    def finish(self):
        self._build()
        return self.built

    def _build(self):
        trace = self.builder.build("general", ORIGIN.drafter_domain, self.version)
        if trace is not None:
            self.built.append(trace)


def rounded(states):
    """Return states in 8 bits and their scales, as a trace rounds them."""
    empty = Array.of(np.empty(0, np.int32))
    trace = small_trace(prompt_ids=empty, hidden=Array.of(states, "bfloat16")).with_rounded_states()
    return {"states": trace.hidden, "states_scale": trace.hidden_scale}


def record_of(rows, version, begun, ended, int8):
    """Return the record of one step; ``rows`` holds pairs of an answer and its event."""
    events = [
        (
            answer.key, event.start, event.read if answer.admission.states_weight else 0, event.tokens, event.drafted,
            event.accepted,
        )
        for answer, event in rows
    ]  # fmt: skip
    record = step_record(events, version, begun, ended)
    ends = [event.start + event.read for _, event in rows]
    new = [slice(end - len(event.tokens) + 1, end + 1) for (_, event), end in zip(rows, ends, strict=True)]
    target = {
        f"target_{name}": Array.of(
            np.concatenate([getattr(answer, name)[part] for (answer, _), part in zip(rows, new, strict=True)])
        )
        for name in ("ids", "logp", "tail")
        if rows
    }
    states = [answer.states[event.start : end] for (answer, event), end in zip(rows, ends, strict=True)
              if answer.admission.states_weight]  # fmt: skip
    if not states:
        return msgspec.structs.replace(record, **target, states=None)
    read = np.concatenate(states)
    form = rounded(read) if int8 else {"states": Array.of(read, "bfloat16")}
    return msgspec.structs.replace(record, **target, **form)


def undated(traces):
    return [msgspec.structs.replace(trace, created=0.0) for trace in traces]


@pytest.mark.parametrize(("seed", "int8"), [*((seed, False) for seed in range(20)), *((n, True) for n in range(5))])
def test_traces_equal_those_of_the_engine(seed, int8):
    chance = np.random.default_rng(seed)
    waiting = [Answer(chance, f"key-{n}", states_weight=float(n % 3)) for n in range(12)]
    running, finished, ended = [], [], []
    version, traces, counts = 0, [], Counter()
    assembly = TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]))
    while waiting or running:
        version += chance.random() < 0.1
        begun = [waiting.pop() for _ in range(min(int(chance.integers(0, 3)), len(waiting)))]
        running += begun
        rows, over = [], []
        for answer in chance.permutation(np.array([*running, None], object)):
            if answer is None or (chance.random() < 0.3 and answer not in begun):
                continue
            event = next(answer.events, None)
            if event is None:
                over.append(answer)
                continue
            rows.append((answer, event))
            answer.expect(event, version)
        record = record_of(rows, version, [answer.admission for answer in begun], ended, int8)
        traces += assembly.add(record, now=0.0)
        running = [answer for answer in running if answer not in over]
        finished, ended = finished + over, [answer.key for answer in over]
    traces += assembly.add(step_record(ended=ended, states=None), now=0.0)
    assert assembly.end_all() == []
    expected = [trace for answer in finished for trace in answer.finish()]
    if int8:
        expected = [trace.with_rounded_states() for trace in expected]
    order = {(trace.request_id, trace.segment): trace for trace in undated(traces)}
    assert [order[trace.request_id, trace.segment] for trace in undated(expected)] == undated(expected)
    assert len(traces) == len(expected) == counts["traces"]
    assert counts == {"closed": 12, "traces": len(traces)}
    assert any(trace.segment for trace in traces)
    assert [decode(encode(trace)) for trace in traces] == traces


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def assembly(counts):
    return TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]))


PROMPT = ("a", 0, 5, [7], [-1], 0)
SECOND = ("a", 5, 2, [8, 9], [8, 10], 1)


def begin(assembly, key="a", **fields):
    record = step_record([(key, *PROMPT[1:])], begun=[admission(key, **fields)])
    return assembly.add(record if fields.get("states_weight", 1) else without_states(record), now=0.0)


def without_states(record):
    return msgspec.structs.replace(record, states=None, state_rows=Array.of(np.zeros(len(record.keys), np.int32)))


def completions(traces):
    return [trace.completion_ids.numpy().tolist() for trace in traces]


def test_trace_has_verdicts_weights_and_labels(assembly):
    begin(assembly, weight=4.0, states_weight=2.0, domain="poems")
    assembly.add(step_record([SECOND], version=1), now=0.0)
    (trace,) = assembly.add(step_record(ended=["a"]), now=0.0)
    assert completions([trace]) == [[7, 8, 9]]
    assert trace.verdict.numpy().tolist() == [NOT_DRAFTED, ACCEPTED, REJECTED]
    assert trace.drafted.numpy().tolist() == [-1, 8, 10]
    assert (trace.weight, trace.states_weight, trace.domain, trace.sources) == (4.0, 2.0, "poems", ("eagle",))
    assert (trace.target, trace.drafter_domain, trace.request_id) == ("tiny@abc", "code", "response-a")


STEP_MISSING = ("a", 8, 1, [3], [-1], 0)
TOKEN_BEFORE_MISSING = ("a", 7, 2, [3], [-1], 0)
OTHER_TOKEN_AT_A_KNOWN_POSITION = ("a", 6, 2, [7, 3], [-1, -1], 0)
UNKNOWN_TOKENS_READ = ("a", 7, 4, [], [], 0)


@pytest.mark.parametrize(("weight", "gap"), [
    (1.0, STEP_MISSING), (1.0, TOKEN_BEFORE_MISSING), (1.0, OTHER_TOKEN_AT_A_KNOWN_POSITION),
    (1.0, UNKNOWN_TOKENS_READ), (0.0, STEP_MISSING), (0.0, OTHER_TOKEN_AT_A_KNOWN_POSITION),
])  # fmt: skip
def test_gap_ends_the_request(assembly, counts, weight, gap):
    form = (lambda record: record) if weight else without_states
    begin(assembly, states_weight=weight)
    assembly.add(form(step_record([SECOND])), now=0.0)
    assert completions(assembly.add(form(step_record([gap])), now=0.0)) == [[7, 8, 9]]
    assert counts["gaps"] == 1
    later = step_record([("a", 8, 1, [11], [-1], 0)], ended=["a"])
    assert assembly.add(form(later), now=0.0) == []


def test_missing_chunk_of_a_prompt_ends_the_request(assembly, counts):
    assembly.add(step_record([("a", 0, 2, [], [], 0)], begun=[admission("a")]), now=0.0)
    assembly.add(step_record([("a", 3, 2, [7], [-1], 0)]), now=0.0)
    assert assembly.end_all() == []
    assert (counts["gaps"], counts["empty"]) == (1, 1)


def test_request_whose_states_are_lost_ends(assembly, counts):
    begin(assembly)
    assert completions(assembly.add(without_states(step_record([SECOND])), now=0.0)) == [[7]]
    assert counts["gaps"] == 1


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_repeated_steps_are_skipped(assembly, counts, weight):
    form = (lambda record: record) if weight else without_states
    begin(assembly, states_weight=weight)
    for _ in range(3):
        assembly.add(form(step_record([SECOND])), now=0.0)
    (trace,) = assembly.add(step_record(ended=["a"]), now=0.0)
    assert completions([trace]) == [[7, 8, 9]]
    assert not counts["gaps"]
    trace.check()


@pytest.mark.parametrize("fields", [
    {"target_ids": Array.of(np.zeros((2, 9), np.int32)), "target_logp": Array.of(np.zeros((2, 9), np.float16))},
    {"states": Array.of(np.zeros((2, 9), np.uint16), "bfloat16")},
    rounded(np.zeros((2, WIDTH), np.uint16)),
])  # fmt: skip
def test_change_of_the_arrays_ends_all_requests(assembly, counts, fields):
    begin(assembly, "a")
    begin(assembly, "b")
    assert completions(assembly.add(step_record([SECOND], **fields), now=0.0)) == [[7], [7]]
    assert counts["gaps"] == 2


def test_step_without_rows_changes_no_array(assembly, counts):
    begin(assembly)
    none = np.empty((0, 0))
    empty = {
        "target_ids": none.astype(np.int32),
        "target_logp": none.astype(np.float16),
        "states": none.astype(np.int8),
    }
    assembly.add(step_record(**{name: Array.of(values) for name, values in empty.items()}), now=0.0)
    assembly.add(step_record([SECOND]), now=0.0)
    assert completions(assembly.end_all()) == [[7, 8, 9]]
    assert not counts["gaps"]


def test_request_without_rows_for_long_ends(assembly, counts):
    begin(assembly, "a")
    begin(assembly, "b")
    assembly.add(step_record([SECOND]), now=10.0)
    assert assembly.expire(SILENT_SECONDS - 1) == []
    (trace,) = assembly.expire(SILENT_SECONDS)
    assert (trace.request_id, counts["expired"]) == ("response-b", 1)
    assert completions(assembly.end_all()) == [[7, 8, 9]]


def test_request_that_ends_before_a_token_leaves_no_trace(assembly, counts):
    assembly.add(step_record([("a", 0, 3, [], [], 0)], begun=[admission("a")]), now=0.0)
    assert assembly.add(step_record(ended=["a", "unknown"]), now=0.0) == []
    assert assembly.end_all() == []
    assert counts == {"closed": 1}


def test_requests_without_a_token_are_counted_when_all_end_early(assembly, counts):
    assembly.add(step_record([("a", 0, 3, [], [], 0)], begun=[admission("a")]), now=0.0)
    begin(assembly, "b")
    assert completions(assembly.end_all()) == [[7]]
    assert counts == {"closed": 2, "traces": 1, "empty": 1}


def test_stop_token_of_a_full_segment_ends_the_request(assembly):
    begin(assembly)
    rows = [("a", 4 + n, 1, [STOP if n == SEGMENT - 1 else 7], [-1], 0) for n in range(1, SEGMENT + 1)]
    traces = [trace for row in rows for trace in assembly.add(step_record([row]), now=0.0)]
    assert completions(traces) == [[7] * (SEGMENT - 1) + [STOP]]
    assert assembly.end_all() == []


def test_stop_token_is_seen_at_a_swap(assembly):
    begin(assembly)
    assembly.add(step_record([("a", 5, 2, [STOP, 9], [STOP, -1], 1)]), now=0.0)
    assert completions(assembly.add(step_record([("a", 7, 1, [4], [-1], 0)], version=2), now=0.0)) == [[7, STOP]]
    assert assembly.add(step_record([("a", 8, 1, [4], [-1], 0)], version=2, ended=["a"]), now=0.0) == []


def test_request_with_a_known_key_ends_the_earlier_one(assembly):
    begin(assembly, request_id="first")
    (trace,) = begin(assembly, request_id="second")
    assert trace.request_id == "first"
    assert [trace.request_id for trace in assembly.end_all()] == ["second"]


def test_requests_above_the_limit_are_counted(counts):
    assembly = TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]), max_requests=2)
    for key in "abc":
        begin(assembly, key)
    assert counts == {"closed": 1, "limited": 1, "empty": 1}
    assembly.add(step_record(ended=["a"]), now=0.0)
    begin(assembly, "d")
    assert [trace.request_id for trace in assembly.end_all()] == ["response-b", "response-d"]


def test_request_above_the_limit_of_bytes_ends(counts):
    assembly = TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]), max_bytes=5000)
    traces = [trace for key in "abcdefgh" for trace in begin(assembly, key)]
    assert (len(traces), counts["limited"]) == (4, 4), "each request takes about 1,020 bytes"
    assert len(assembly.end_all()) == 4


def test_ended_requests_take_no_bytes(counts):
    assembly = TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]), max_bytes=20_000)
    for _ in range(20):
        begin(assembly)
        for n in range(1, 2 * SEGMENT):
            assembly.add(step_record([("a", 4 + n, 1, [7], [-1], 0)], version=n // 5), now=0.0)
        assembly.add(step_record([("a", 0, 9, [], [], 0)], ended=["a"]), now=0.0)
        begin(assembly, "b")
        assembly.purge(lambda request_id: True)
        begin(assembly, "c", max_tokens=1)
        assert len(assembly.end_all()) == 1
    assert not counts["limited"]


def test_open_request_does_not_keep_the_bytes_of_a_step(assembly):
    rows = [PROMPT, ("not captured", 0, 1000, [], [], 0)]
    data = bytearray(b"".join(encode_step(step_record(rows, begun=[admission("a")]))))
    assembly.add(decode_step(memoryview(data)), now=0.0)
    data.clear()  # fails while an array shares the memory
    assert completions(assembly.end_all()) == [[7]]


def test_purged_request_leaves_no_trace(counts):
    purged = set()
    assembly = TraceAssembly(ORIGIN, SEGMENT, lambda name: counts.update([name]), purged.__contains__)
    begin(assembly, "a")
    begin(assembly, "b")
    purged |= {"response-a", "response-c"}
    assert assembly.purge(purged.__contains__) == 1
    begin(assembly, "c")
    assert counts == {"closed": 2, "purged": 2}
    assembly.add(step_record([SECOND], ended=["a"]), now=0.0)
    assert [trace.request_id for trace in assembly.end_all()] == ["response-b"]
