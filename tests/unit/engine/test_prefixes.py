"""Prefix cache: shared beginnings of prompts are read once and do not change answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from torch import Tensor

from osd.capture.trace import Trace
from osd.config import EngineSettings
from osd.drafting import Drafter
from osd.engine.request import SamplingParams
from osd.engine.slots import SlotManager
from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import DEVICE
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running
from tests.unit.engine.toys import Lookup, Rider, Skip
from tests.waiting import HANG_SECONDS

OTHER, PROMPT = prompts([3, 40], seed=8)
CHUNK = 16  # tokens, so that the prompt is read in three steps
KINDS = ["none", "eagle", "language_model"]


class ForwardRecorder:
    """Recorder of the rows of each forward, which can hold some forwards back."""

    def __init__(self, client: Client, held: tuple[int, ...] = ()) -> None:
        self.rows: list[int] = []
        self._arrived = {number: threading.Event() for number in held}
        self._go = {number: threading.Event() for number in held}
        client.submit("first", OTHER, 1)
        client.wait()  # calibration is over
        forward = client.engine.target.forward

        def recorder(rows: PackedRows, wanted: Tensor) -> Forward:
            number = len(self.rows)
            self.rows.append(len(rows.token_ids))
            if number in self._go:
                self._arrived[number].set()
                assert self._go[number].wait(HANG_SECONDS)
            return forward(rows, wanted)

        client.engine.target.forward = recorder

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        assert self._arrived[number].wait(HANG_SECONDS)
        try:
            yield
        finally:
            self._go[number].set()


def same_states(first: Trace, second: Trace, kind: str) -> None:
    assert (first.states is not None) == (second.states is not None) == (kind == "eagle")
    if first.states is not None and second.states is not None:
        near = 0.0 if DEVICE.type == "cpu" else 0.02  # a GPU may sum in another order
        np.testing.assert_allclose(first.states, second.states, rtol=near, atol=near)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_are_read_once(target_dir: Path, oracle: Oracle, kind: str) -> None:
    traces: list[Trace] = []
    similar = [*PROMPT[:36], 7, 8, 9]
    with running(target_dir, kind, chunk=CHUNK, slots=5, traces=traces) as client:
        recorder = ForwardRecorder(client, (0,))
        client.submit("other", OTHER, 1)
        with recorder.holding(0):
            for name in "abc":
                client.submit(name, PROMPT, 12, ignore_eos=True, capture=True)
            client.submit("similar", similar, 12, ignore_eos=True)
        results = client.wait()
        client.submit("alone", PROMPT, 12, ignore_eos=True, capture=True)
        alone = client.wait()["alone"]
    assert sum(recorder.rows[1:4]) == len(PROMPT)
    assert results["similar"].cached == 36
    assert results["similar"].tokens == oracle.greedy(similar, 12)
    for name in "abc":
        assert results[name].tokens == alone.tokens == oracle.greedy(PROMPT, 12)
        assert results[name].counts == alone.counts, "their drafters have read the prompt, too"
    prompt_traces = [trace for trace in traces if len(trace.prompt_ids.numpy()) == len(PROMPT)]
    assert len(prompt_traces) == 4
    for trace in prompt_traces:
        same_states(trace, prompt_traces[0], kind)


def test_equal_prompts_draw_by_their_own_seeds(target_dir: Path) -> None:
    with running(target_dir, "eagle", chunk=CHUNK) as client:
        recorder = ForwardRecorder(client, (0,))
        client.submit("other", OTHER, 1)
        with recorder.holding(0):
            for seed in range(3):
                client.submit(str(seed), PROMPT, 12, SamplingParams(temperature=1.0, seed=seed), ignore_eos=True)
        together = [client.wait()[str(seed)].tokens for seed in range(3)]
        assert sum(recorder.rows[1:4]) == len(PROMPT)
        for seed in range(3):
            client.submit(f"alone {seed}", PROMPT, 12, SamplingParams(temperature=1.0, seed=seed), ignore_eos=True)
            assert client.wait()[f"alone {seed}"].tokens == together[seed]
    assert len(set(map(tuple, together))) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_continue_when_the_reader_is_cancelled(target_dir: Path, oracle: Oracle, kind: str) -> None:
    with running(target_dir, kind, chunk=CHUNK) as client:
        recorder = ForwardRecorder(client, (0, 2))
        client.submit("other", OTHER, 1)
        with recorder.holding(0):
            for name in "abc":
                client.submit(name, PROMPT, 12, ignore_eos=True)
        with recorder.holding(2):
            client.engine.cancel("a")
        results = client.wait()
    assert sum(recorder.rows[1:4]) == len(PROMPT)
    assert results["a"].finish == "cancelled"
    for name in "bc":
        assert results[name].tokens == oracle.greedy(PROMPT, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_of_an_ended_request_is_not_read_again(target_dir: Path, oracle: Oracle, kind: str) -> None:
    second = [*PROMPT[:30], 7, 8, 9]
    traces: list[Trace] = []
    drafter = make_drafter(kind, target_dir)
    with running(target_dir, kind, drafter=drafter, chunk=64, traces=traces) as client:
        client.submit("first", PROMPT, 12, ignore_eos=True)
        client.wait()
        recorder = ForwardRecorder(client)
        client.submit("second", second, 12, ignore_eos=True, capture=True)
        result = client.wait()["second"]
        counters = client.engine.counters()
    assert recorder.rows[0] == 3
    assert result.tokens == oracle.greedy(second, 12)
    assert result.cached == counters.cached_tokens == 30
    assert counters.prompt_tokens == 40 + 3 + 33
    with running(target_dir, kind, drafter=drafter, chunk=64, traces=traces, prefix_cache=False) as client:
        client.submit("second", second, 12, ignore_eos=True, capture=True)
        alone = client.wait()["second"]
    assert (alone.tokens, alone.counts, alone.cached) == (result.tokens, result.counts, 0)
    same_states(traces[0], traces[1], kind)


@pytest.mark.parametrize("kind", [*KINDS, "kangaroo", Lookup, Rider, Skip])
def test_conversation_reuses_its_previous_answer(target_dir: Path, oracle: Oracle, kind: str | type[Drafter]) -> None:
    drafter = make_drafter(kind, target_dir) if isinstance(kind, str) else kind()
    with running(target_dir, drafter=drafter) as client:
        client.submit("question", PROMPT, 12, ignore_eos=True)
        more = PROMPT + client.wait()["question"].tokens + [1, 2, 3]
        client.submit("more", more, 12, ignore_eos=True)
        result = client.wait()["more"]
    assert result.tokens == oracle.greedy(more, 12)
    assert result.cached == len(PROMPT) + 11, "the last token of an answer is never fed"


def test_oldest_free_slot_is_taken_first(target_dir: Path) -> None:
    def cached(prompt: list[int]) -> int:
        client.submit("next", prompt, 2, ignore_eos=True)
        return client.wait()["next"].cached

    a, b, c = prompts([20, 20, 20], seed=3)
    with running(target_dir, slots=2) as client:
        assert [cached(prompt) for prompt in (a, b)] == [0, 0]
        assert cached([*b, 1]) == 20, "taken without a copy"
        assert cached([*a, 1]) == 20, "the other slot is unchanged"
        assert cached(a[:5] + c) == 5, "copied into the older slot"
        assert [cached(prompt) for prompt in (a, b)] == [19, 0]


def test_disabled_prefix_cache_reads_every_prompt(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "eagle", chunk=128, prefix_cache=False) as client:
        recorder = ForwardRecorder(client, (0,))
        client.submit("other", OTHER, 1)
        with recorder.holding(0):
            for name in "ab":
                client.submit(name, PROMPT, 12, ignore_eos=True)
        results = client.wait()
    assert recorder.rows[1] == 2 * len(PROMPT)
    for name in "ab":
        assert (results[name].tokens, results[name].cached) == (oracle.greedy(PROMPT, 12), 0)


def test_slot_after_a_failed_step_is_not_reused(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "eagle", chunk=CHUNK) as client:
        forward, calls = client.engine.target.forward, 0

        def failing(rows: PackedRows, wanted: Tensor) -> Forward:
            nonlocal calls
            calls += 1
            result = forward(rows, wanted)
            if calls == 2:
                client.engine.target.cache.keys.fill_(1e4)
                raise MemoryError
            return result

        client.submit("warm", OTHER, 1)
        client.wait()
        client.engine.target.forward = failing
        client.submit("a", PROMPT, 12, ignore_eos=True)
        assert client.wait()["a"].finish == "error"
        client.submit("b", PROMPT, 12, ignore_eos=True)
        result = client.wait()["b"]
    assert (result.cached, result.tokens) == (0, oracle.greedy(PROMPT, 12))


@pytest.mark.parametrize("kind", KINDS)
def test_many_shared_prefixes_keep_every_answer(target_dir: Path, oracle: Oracle, kind: str) -> None:
    draw = random.Random(5)  # noqa: S311
    texts: list[list[int]] = [[3]]
    for _ in range(40):
        start = draw.choice(texts)
        texts.append(start[: draw.randint(1, len(start))] + draw.choices(range(256), k=draw.randint(1, 9)))
    with running(target_dir, kind, slots=3, chunk=8) as client:
        for number, prompt in enumerate(texts):
            client.submit(str(number), prompt, 1 + number % 5, ignore_eos=True)
        results = client.wait()
        cached = client.engine.counters().cached_tokens
    for number, prompt in enumerate(texts):
        assert results[str(number)].tokens == oracle.greedy(prompt, 1 + number % 5)
    assert cached == sum(result.cached for result in results.values())
    assert cached >= len(texts) - 3, "all share the first token, and three began before it was read"


def test_keys_after_the_end_of_a_request_are_not_shared(target_dir: Path) -> None:
    """An accepted draft may pass the end of its request, and the next turn may contain its text."""
    target = SlotModel(load_model(target_dir, "float32", "cpu"), slots=2, context=64, scratch=8)
    slots = SlotManager(target, EngineSettings(slots=2, context=64))

    def admitted(tokens: list[int], kept: int) -> Any:
        s = SimpleNamespace(tokens=tokens, fed=0, slot=-1, exact_tokens=64, request=SimpleNamespace(client=""))
        slots.take(s)  # type: ignore[arg-type]
        cached = s.fed
        slots.keep([s], [cached], [list(range(kept - cached))])  # type: ignore[list-item]
        return s, cached

    long, _ = admitted(list(range(10)), kept=9)
    ended, _ = admitted([*range(8)], kept=12)  # four accepted nodes after its last token
    slots.give_back(long.slot)
    slots.give_back(ended.slot)
    _, cached = admitted([*range(10), 40, 41, 42], kept=12)
    assert cached == 9
    _, cached = admitted([*range(8), 50, 51, 52, 53, 54], kept=12)
    assert cached == 8


def test_clients_do_not_share_prefixes(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "none", slots=3, chunk=CHUNK) as client:
        for name, who in (("hers", "her"), ("his", "him"), ("anonymous", "")):  # submitted together, so that none waits
            client.submit(name, PROMPT, 4, ignore_eos=True, client=who)
        client.wait()
        for name, who in (("hers again", "her"), ("other", "other"), ("other again", "other")):
            client.submit(name, PROMPT, 4, ignore_eos=True, client=who)
            client.wait()
        results = client.results
    assert {name: result.cached for name, result in results.items()} == {
        "hers": 0, "his": 0, "anonymous": 0, "hers again": len(PROMPT) - 1,
        "other": 0, "other again": len(PROMPT) - 1,
    }  # fmt: skip
    for result in results.values():
        assert result.tokens == oracle.greedy(PROMPT, 4)


@pytest.mark.parametrize("kv_mb", [None, 8])
def test_slot_memory_is_touched_unless_memory_is_scarce(target_dir: Path, kv_mb: int | None, monkeypatch):
    target = SlotModel(load_model(target_dir, "float32", "cpu"), slots=4, context=64, scratch=8)
    slots = SlotManager(target, EngineSettings(slots=4, context=64, kv_mb=kv_mb))
    for cache in (target.cache.keys, target.cache.values):
        cache.fill_(1)  # marks memory that was not touched

    def touched() -> list[int]:
        return [
            slot for slot in range(4) if not target.cache.keys[:, slot].any() and not target.cache.values[:, slot].any()
        ]

    free = iter([0.3, *[0.6] * 20])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8.0, available=8 * next(free)))
    slots.touch_memory(lambda seconds: True)
    assert touched() == []  # not enough available memory
    idle = iter([True, True, False])
    slots.touch_memory(lambda seconds: next(idle))
    assert touched() == ([] if kv_mb else [0, 1])  # stopped by work
    slots.touch_memory(lambda seconds: True)
    assert touched() == ([] if kv_mb else [0, 1, 2, 3])
