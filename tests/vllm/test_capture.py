"""Capture in real vLLM processes: traces against a pass of transformers, consent, swaps, purges, and equal answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.vllm.server import VllmServer
from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.capture.server import RedisServer
from osd.capture.trace import NOT_DRAFTED, Trace
from osd.config import Settings
from osd.target.identity import identify
from tests.vllm.conftest import VllmWorld
from tests.vllm.traffic import Traffic, at_once, random_prompts, settled, stored
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

LENGTHS = {"v1": 60, "v2": 16}
"""Tokens of an answer; the second model runner takes a second per step on a CPU."""

_FAR = 600.0
_PREEMPTIONS, _HITS = "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"


class Captured:
    """Server with capture after traffic of every kind."""

    def __init__(self, kind: str, world: VllmWorld, server: VllmServer, redis_url: str) -> None:
        self.world, self.server, self.redis_url = world, server, redis_url
        self.traffic = Traffic(server.url, LENGTHS[kind])
        self.prompts = random_prompts(1)
        complete, prompts = self.traffic.complete, self.prompts
        self.greedy = at_once([partial(complete, prompt) for prompt in prompts])
        sampled = {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        at_once([partial(complete, prompt, **sampled) for prompt in prompts[:4]])
        self.traffic.complete_all(prompts[:2], n=2, temperature=0.9)
        complete(prompts[2], structured_outputs={"regex": "[ab]{12}"})
        complete(prompts[3], store=False)
        complete(prompts[4], osd={"domain": "other"})
        self.chat = self.traffic.chat("Hello", n=2, temperature=0.9)
        self.abandoned = [1, 2, 3, 5, 8]
        self.traffic.abandon(self.abandoned)
        self._swap()
        self.traces = self.by_request(settled(redis_url))

    def by_request(self, traces: list[Trace]) -> dict[str, list[Trace]]:
        """Return the segments of each request in order."""
        requests: dict[str, list[Trace]] = defaultdict(list)
        for trace in sorted(traces, key=lambda trace: trace.segment):
            trace.check()
            requests[trace.request_id].append(trace)
        return requests

    def _swap(self) -> None:
        """Load version 2 while requests decode."""
        done = threading.Event()

        def decode() -> None:
            while not done.is_set():
                self.traffic.complete(self.prompts[0], max_tokens=100)

        thread = threading.Thread(target=decode)
        thread.start()
        try:
            self.world.activate(2)
            wait_until(lambda: self.server.scrape().sum("osd_draft_version") == 2, seconds=_FAR, every=0.2)
        finally:
            done.set()
            thread.join()
            self.world.activate(1)


@pytest.fixture(scope="module", params=["v1", "v2"])
def captured(request: pytest.FixtureRequest, vllm_world: VllmWorld) -> Iterator[Captured]:
    """Server with each model runner; states are captured without rounding."""
    settings = {"OSD_VLLM_CAPTURE": "1", "OSD_CAPTURE__STATES": "full", "OSD_CAPTURE__MAX_RECORDS": "4096"}
    with RedisServer(256) as redis, vllm_world.server(request.param, redis.url, **settings) as server:
        try:
            made = Captured(request.param, vllm_world, server, redis.url)
        finally:
            print(server.output())  # shown when a request failed
        for line in ("Using V2 Model Runner", "asynchronous scheduling: True"):
            assert (line in server.output()) == (request.param == "v2")
        yield made


def test_traces_equal_a_float32_pass_of_transformers(captured):
    model = AutoModelForCausalLM.from_pretrained(captured.world.target, dtype=torch.float32).eval()
    places = far = 0
    worst = SimpleNamespace(logp=0.0, states=0.0)
    for name, segments in captured.traces.items():
        answer = captured.traffic.answers.get(name)
        if answer is None:
            continue
        tokens = answer.prompt + answer.tokens
        with torch.no_grad():
            result = model(torch.tensor([tokens]), output_hidden_states=True)
        exact = result.logits[0].log_softmax(-1).numpy()
        layers = torch.cat([result.hidden_states[tap + 1][0] for tap in captured.world.taps], -1).numpy()
        end = len(answer.prompt)
        for trace in segments:
            count, begin = trace.completion_ids.shape[0], end - trace.prompt_ids.shape[0]
            ids = trace.target_ids.numpy().astype(np.int64)
            rows = exact[end - 1 : end - 1 + count]
            far += int((rows.argmax(-1) != ids[:, 0]).sum())
            got = trace.target_logp.numpy().astype(np.float32)
            worst.logp = max(worst.logp, float(np.abs(np.take_along_axis(rows, ids, 1) - got).max()))
            mass = np.exp(got).sum(1) + np.exp(trace.target_tail.numpy().astype(np.float32))
            np.testing.assert_allclose(mass, 1, atol=0.01)
            states, expected = trace.states, layers[begin : end + count - 1]
            assert states is not None
            worst.states = max(worst.states, float(np.linalg.norm(states - expected) / np.linalg.norm(expected)))
            end, places = end + count, places + count
    print(f"{places} places, {far} other argmax, {worst.logp:.4f} log-probability, {worst.states:.4f} states")
    assert places > 200
    assert far == 0
    assert worst.logp <= 0.01
    assert worst.states <= 0.003


def test_sampled_tokens_are_as_probable_as_draws_from_the_target(captured):
    """The sum of their log-probabilities is within four standard deviations of its expectation."""
    model = AutoModelForCausalLM.from_pretrained(captured.world.target, dtype=torch.float32).eval()
    excess, variance = 0.0, 0.0
    for answer in captured.traffic.answers.values():
        temperature = answer.body["temperature"]
        if temperature == 0 or "presence_penalty" in answer.body:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt + answer.tokens])).logits[0, len(answer.prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        mean = (logp.exp() * logp).sum(-1)
        excess += float((logp[range(len(answer.tokens)), answer.tokens] - mean).sum())
        variance += float((logp.exp() * (logp - mean[:, None]) ** 2).sum())
    print(f"{excess:.1f} above the expectation, standard deviation {variance**0.5:.1f}")
    assert variance > 0
    assert abs(excess) < 4 * variance**0.5


def test_each_answer_has_its_trace_and_no_other_request_has(captured):
    for name, answer in captured.traffic.answers.items():
        segments = captured.traces.get(name, [])
        if answer.body.get("store") is False:
            assert not segments
            continue
        tokens = [token for trace in segments for token in trace.completion_ids.numpy().tolist()]
        assert tokens == answer.tokens, name
        prompt = segments[0].prompt_ids.numpy().tolist()
        assert answer.prompt[-len(prompt) :] == prompt
        assert segments[0].temperature == answer.body["temperature"]
        assert segments[0].domain == (answer.body.get("osd") or {}).get("domain", "general")
    others = captured.traces.keys() - captured.traffic.answers.keys()
    assert {f"{captured.chat}-0", f"{captured.chat}-1"} < others
    (abandoned,) = [name for name in others if not name.startswith("chatcmpl")]
    assert captured.traces[abandoned][0].prompt_ids.numpy().tolist() == captured.abandoned


def test_traffic_was_chunked_cached_preempted_and_drafted(captured):
    scrape = captured.server.scrape()
    assert scrape.sum(_PREEMPTIONS) > 0
    assert scrape.sum(_HITS) > 0
    segments = [trace for traces in captured.traces.values() for trace in traces]
    answers = captured.traffic.answers
    first = {name: traces[0].prompt_ids.shape[0] for name, traces in captured.traces.items() if name in answers}
    assert any(length < len(answers[name].prompt) for name, length in first.items()), "a prefix was cached"
    assert any(length > 64 for length in first.values()), "a prompt was read in several chunks"
    verdicts = np.concatenate([trace.verdict.numpy() for trace in segments])
    assert (verdicts != NOT_DRAFTED).mean() > 0.5
    assert {trace.target for trace in segments} == {identify("tiny", captured.world.target).label}


def test_swap_begins_a_segment_with_the_new_version(captured):
    versions = [[trace.drafter_version for trace in segments] for segments in captured.traces.values()]
    assert [1, 2] in versions
    assert all(sorted(each) == each for each in versions)


def test_metrics_count_captured_and_skipped_requests(captured):
    # Without the request whose store is false, and with two chats and the abandoned request.
    requests = len(captured.traffic.answers) - 1 + 3
    scrape = captured.server.scrape
    wait_until(lambda: scrape().sum("osd_capture_requests_total") == requests, seconds=60)
    assert scrape().sum("osd_capture_skipped_total", reason="store") == 1
    assert scrape().sum("osd_capture_errors_total") == 0
    assert scrape().sum("osd_capture_dropped_total") == 0
    assert scrape().sum("osd_capturing") == 1
    segments = sum(map(len, captured.traces.values()))
    wait_until(lambda: scrape().sum("osd_capture_traces_total") == segments, seconds=60)


def test_greedy_answers_are_the_same_without_capture(captured, request):
    kind = request.node.callspec.params["captured"]
    with captured.world.server(kind, captured.redis_url) as server:
        plain = Traffic(server.url, LENGTHS[kind])
        assert at_once([partial(plain.complete, prompt) for prompt in captured.prompts]) == captured.greedy
        assert server.scrape().sum("osd_capturing") == 0


def test_purge_of_a_response_removes_all_of_its_traces(captured, tmp_path: Path):
    settings: Any = Settings(home=tmp_path, redis_url=captured.redis_url)
    several = next(name for name, answer in captured.traffic.answers.items() if answer.body.get("n") == 2)
    for response, choices in ((captured.chat, 2), (several.rpartition("-")[0], 4)):
        result = purge_request(settings, captured.redis_url, Actor("test", ""), response)
        assert result.streamed == choices
        assert not [trace for trace in stored(captured.redis_url) if trace.request_id.startswith(response)]
