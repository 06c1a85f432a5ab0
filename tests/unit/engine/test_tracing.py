"""Traces, compared with forwards of the target and an unrolled drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Trace, decode, encode
from osd.drafting import Drafter
from osd.engine.request import Request, SamplingParams
from osd.engine.trace_builder import TraceBuilder
from osd.learning.batch import collate
from osd.runtime.top import most_probable
from tests.unit.engine.harness import Oracle, Result, make_drafter, prompts, running

K = 6


def traces_of(
    directory: Path, drafter: Drafter | None, sampling: SamplingParams, tokens: int = 30, **capture: Any
) -> tuple[dict[str, list[Trace]], dict[str, Result]]:
    """Decode three requests and return their records, sent through the wire format, and their results."""
    records: list[Trace] = []
    with running(directory, drafter=drafter, traces=records, int8=False, top_k=K, **capture) as client:
        client.submit("private", [1, 2], tokens, sampling)
        client.ask(prompts([1, 9, 37]), tokens, sampling=sampling, capture=True, domain="poems")
        results = client.results
    grouped: dict[str, list[Trace]] = {}
    for trace in records:
        grouped.setdefault(trace.request_id, []).append(decode(encode(trace)))
    return grouped, results


def test_traced_states_are_copies() -> None:
    step = torch.zeros(100, 4, dtype=torch.bfloat16)
    builder = TraceBuilder(Request("r", (1, 2, 3), 2), "toy", 64)
    builder.feed(step[:3])
    step.fill_(7)
    builder.add([4], most_probable(torch.zeros(1, 9), range(1), 2), None, [], 0)
    builder.feed(torch.zeros(1, 4))
    trace = builder.build("general", "general", 1)
    assert trace is not None
    assert not floats(trace).any()


def floats(trace: Trace) -> Tensor:
    assert trace.hidden.dtype == "bfloat16"
    return torch.from_numpy((trace.hidden.numpy().astype(np.uint32) << 16).view(np.float32))


def check_target(trace: Trace, oracle: Oracle, whole: list[int], start: int, taps: tuple[int, ...]) -> None:
    """Compare a trace, which begins at token ``start`` of ``whole``, with the target."""
    prompt, completion = trace.prompt_ids.numpy().tolist(), trace.completion_ids.numpy().tolist()
    assert whole[start - len(prompt) : start + len(completion)] == prompt + completion
    with torch.no_grad():
        out = oracle.model(input_ids=torch.tensor([whole]), output_hidden_states=True)
    logp = out.logits[0, start - 1 : start - 1 + len(completion)].log_softmax(-1)
    values, _ = logp.topk(K, -1)
    ids = torch.from_numpy(trace.target_ids.numpy().copy()).long()
    got = torch.from_numpy(trace.target_logp.numpy().copy()).float()
    torch.testing.assert_close(got, values, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got, logp.gather(-1, ids), rtol=2e-3, atol=2e-3)
    tail = torch.from_numpy(trace.target_tail.numpy().copy()).float()
    torch.testing.assert_close(tail.exp(), 1 - values.exp().sum(-1), rtol=3e-3, atol=1e-5)
    if taps:
        goal = torch.cat([out.hidden_states[tap + 1][0] for tap in taps], -1)
        goal = goal[start - len(prompt) : start + len(completion) - 1]
        torch.testing.assert_close(floats(trace), goal, rtol=1e-2, atol=1e-3)


def check_draft(trace: Trace, drafter: Drafter, first: bool) -> None:
    """Compare the draft distributions with the drafter, unrolled by the number of tokens accepted just before."""
    verdict, drafted, ids = trace.verdict.numpy(), trace.drafted.numpy(), trace.draft_ids.numpy()
    completion = trace.completion_ids.numpy()
    assert ((drafted >= 0) == (verdict != NOT_DRAFTED)).all()
    assert trace.sources == (drafter.kind,)
    assert ((trace.source.numpy() == 0) == (verdict != NOT_DRAFTED)).all()
    assert (drafted[verdict == ACCEPTED] == completion[verdict == ACCEPTED]).all()
    assert (drafted[verdict == REJECTED] != completion[verdict == REJECTED]).all()
    assert (ids[verdict == NOT_DRAFTED] == -1).all()
    if not first:  # the drafter has seen more context than the record has
        return
    batch = collate([trace])
    with torch.no_grad():
        unrolled = drafter.unroll(batch, 3)
    depth = 0
    for place in range(len(completion)):
        if verdict[place] != NOT_DRAFTED:
            logp = unrolled[depth][place].log_softmax(-1)
            support = drafter.draft_ids if drafter.draft_ids is not None else torch.arange(len(logp))
            columns = torch.searchsorted(support, torch.from_numpy(ids[place].copy()).long())
            assert torch.equal(support[columns], torch.from_numpy(ids[place].copy()).long())
            got = torch.from_numpy(trace.draft_logp.numpy()[place].copy()).float()
            torch.testing.assert_close(got, logp[columns], rtol=0.05, atol=0.15)  # served in bfloat16
            rest = 1 - got.exp().sum()
            assert abs(float(np.exp(float(trace.draft_tail.numpy()[place])) - rest)) < 5e-3
        depth = depth + 1 if verdict[place] == ACCEPTED else 0


@pytest.mark.parametrize("kind", ["none", "eagle", "language_model"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.0), SamplingParams(0.8, top_k=50, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_trace_matches_the_models(target_dir: Path, oracle: Oracle, kind: str, sampling: SamplingParams) -> None:
    drafter = make_drafter(kind, target_dir)
    grouped, results = traces_of(target_dir, drafter, sampling)
    assert set(grouped) == {"0", "1", "2"}, "requests without capture are not recorded"
    for index, prompt in enumerate(prompts([1, 9, 37])):
        (trace,), result = grouped[str(index)], results[str(index)]
        assert trace.completion_ids.numpy().tolist() == result.tokens
        assert trace.prompt_ids.numpy().tolist() == prompt
        assert (trace.domain, trace.drafter_version, trace.segment) == ("poems", 1, 0)
        assert trace.after == (None, None, None), "not recorded without training on the drafter's samples"
        assert (trace.temperature, trace.top_k, trace.top_p) == (sampling.temperature, sampling.top_k, sampling.top_p)
        check_target(trace, oracle, prompt + result.tokens, len(prompt), drafter.needs.taps if drafter else ())
        verdict = trace.verdict.numpy()
        assert verdict[0] == NOT_DRAFTED
        assert int((verdict == ACCEPTED).sum()) == result.counts.accepted
        assert (trace.hidden is None) == (kind != "eagle")
        if drafter is not None:
            assert (verdict != NOT_DRAFTED).any()
            check_draft(trace, drafter, first=True)


def test_long_request_is_captured_in_adjoining_segments(target_dir: Path, oracle: Oracle) -> None:
    drafter = make_drafter("eagle", target_dir)
    grouped, results = traces_of(target_dir, drafter, SamplingParams(1.0, seed=5), tokens=70, segment=16)
    for index, prompt in enumerate(prompts([1, 9, 37])):
        traces, whole = grouped[str(index)], prompt + results[str(index)].tokens
        assert [trace.segment for trace in traces] == [0, 1, 2, 3, 4]
        assert [trace.completion_ids.shape[0] for trace in traces] == [16, 16, 16, 16, 6]
        start = len(prompt)
        for number, trace in enumerate(traces):
            assert trace.prompt_ids.shape[0] == (len(prompt) if number == 0 else min(16, start))
            check_target(trace, oracle, whole, start, drafter.needs.taps)
            check_draft(trace, drafter, first=number == 0)
            start += trace.completion_ids.shape[0]
        assert start == len(whole)


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_disabled_capture_records_nothing(target_dir: Path, kind: str) -> None:
    drafter = make_drafter(kind, target_dir)
    grouped, results = traces_of(target_dir, drafter, SamplingParams(0.0), tokens=5, enabled=False)
    assert not grouped
    assert all(result.finish for result in results.values())


@pytest.mark.parametrize("kind", ["eagle", "language_model"])
@pytest.mark.parametrize("segment", [64, 16])
@pytest.mark.parametrize("sampling", [SamplingParams(0.0), SamplingParams(0.8, seed=3)], ids=["greedy", "drawn"])
def test_trace_has_the_target_after_rejected_tokens(
    target_dir: Path, oracle: Oracle, kind: str, segment: int, sampling: SamplingParams
) -> None:
    drafter = make_drafter(kind, target_dir)
    grouped, results = traces_of(target_dir, drafter, sampling, segment=segment, samples="student")
    seen = 0
    for index, prompt in enumerate(prompts([1, 9, 37])):
        text, at = prompt + results[str(index)].tokens, len(prompt)
        for trace in grouped[str(index)]:
            rejected = np.flatnonzero(trace.verdict.numpy() == REJECTED)
            if not len(rejected):
                assert trace.after == (None, None, None)
            for row, place in enumerate(rejected.tolist()):
                ids, logp, tail = (array.numpy()[row].copy() for array in trace.after if array is not None)
                context = [*text[: at + place], int(trace.drafted.numpy()[place])]
                with torch.no_grad():
                    goal = oracle.model(input_ids=torch.tensor([context])).logits[0, -1].log_softmax(-1)
                torch.testing.assert_close(torch.from_numpy(logp).float(), goal.topk(K).values, rtol=2e-3, atol=2e-3)
                got = goal[torch.from_numpy(ids).long()]
                torch.testing.assert_close(torch.from_numpy(logp).float(), got, rtol=2e-3, atol=2e-3)
                assert float(np.exp(float(tail))) == pytest.approx(1 - float(got.exp().sum()), abs=3e-3)
                seen += 1
            at += len(trace.completion_ids.numpy())
    assert seen > 10


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_traces_have_states_with_their_weights(target_dir: Path, prefix_cache: bool) -> None:
    records: list[Trace] = []
    calls: list[tuple[str, str]] = []

    def weight_of(domain: str, request: str) -> float:
        calls.append((domain, request))
        return {"1": 4.0, "2": 1.0}.get(request, 0.0)

    drafter, prompt = make_drafter("eagle", target_dir), prompts([21])[0]
    more: dict[str, Any] = {"traces": records, "states": weight_of, "prefix_cache": prefix_cache, "segment": 16}
    with running(target_dir, drafter=drafter, **more) as client:
        for number in range(4):
            client.submit(str(number), prompt, 30, ignore_eos=True, capture=True, domain="poems")
        client.wait()
    assert sorted(calls) == [("poems", str(number)) for number in range(4)]
    decoded = {(record.request_id, record.segment): decode(encode(record)) for record in records}
    assert len(decoded) == 8  # two records each
    for (request, _), record in decoded.items():
        assert record.states_weight == {"1": 4.0, "2": 1.0}.get(request, 0.0)
        assert (record.hidden is None) == (record.states_weight == 0)
    for segment in (0, 1):
        assert decoded["1", segment].hidden == decoded["2", segment].hidden  # the same text
        assert decoded["0", segment].target_ids == decoded["2", segment].target_ids
