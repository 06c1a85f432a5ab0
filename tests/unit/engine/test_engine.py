"""Behaviour of the engine for its clients."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.config import LanguageModelSettings
from osd.drafting import initial
from osd.engine import loop
from osd.engine import step as step_module
from osd.engine.request import SamplingParams
from tests.tiny import tokenizer
from tests.unit.engine import harness
from tests.unit.engine.harness import Oracle, Result, make_drafter, prompts, running, tokens_of, with_noise
from tests.waiting import HANG_SECONDS, wait_until

KINDS = ["none", "eagle", "language_model"]
LENGTHS = (1, 5, 17, 40, 33, 3, 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [5, 64])
def test_greedy_output_matches_transformers(target_dir: Path, oracle: Oracle, kind: str, chunk: int) -> None:
    with running(target_dir, kind, slots=3, chunk=chunk) as client:
        results = client.ask(prompts(LENGTHS), 20)
        counters = client.engine.counters()
    assert tokens_of(results) == oracle.all(prompts(LENGTHS), 20)
    assert {result.finish for result in results} == {"length"}
    assert (counters.requests, counters.failed, counters.cancelled) == (len(LENGTHS), 0, 0)
    assert (counters.prompt_tokens, counters.completion_tokens) == (sum(LENGTHS), 20 * len(LENGTHS))
    total = counters.speculation()
    if kind == "none":
        assert total.rounds == total.drafted == 0
    else:
        counts_by_request = [result.counts for result in results]
        assert total.drafted == sum(counts.drafted for counts in counts_by_request) > 0
        assert (
            total.accepted
            == sum(counts.accepted for counts in counts_by_request)
            == sum(total.accepted_per_position)
            > 0
        )
        assert sum(total.histogram) == total.rounds
        assert sum(n * times for n, times in enumerate(total.histogram)) == total.accepted


def test_threads_that_answer_clients_run_before_the_engine(target_dir: Path) -> None:
    with running(target_dir) as client:
        client.ask(prompts([3]), 1)
        engine = next(thread for thread in threading.enumerate() if thread.name == "osd-engine")
        niceness, here = (os.getpriority(os.PRIO_PROCESS, number or 0) for number in (engine.native_id, 0))
    assert niceness == min(here + 5, 19)


def test_wait_for_request_ends_when_a_request_arrives(target_dir: Path) -> None:
    with running(target_dir) as client:
        ended = threading.Event()

        def wait() -> None:
            client.engine.wait_for_request(2 * HANG_SECONDS)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        wait_until(lambda: client.ask(prompts([3]), 1) and ended.is_set())


def greedy_run(oracle: Oracle) -> tuple[list[int], list[int]]:
    prompt = prompts([9], seed=4)[0]
    return prompt, oracle.greedy(prompt, 24)


@pytest.mark.parametrize("end", [0, 7])
def test_end_token_of_the_tokenizer_ends_an_answer(target_dir: Path, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokenizer()
    tokens.eos_token = tokens.convert_ids_to_tokens(end)
    monkeypatch.setattr(harness, "tokenizer", lambda: tokens)
    with running(target_dir) as client:
        client.submit("ends", prompts([9])[0], 24, SamplingParams(temperature=0.0, logit_bias=((end, 100.0),)))
        result = client.wait()["ends"]
    assert (result.tokens, result.finish) == ([end], "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_end_tokens_and_stop_ids_end_after_min_tokens(target_dir: Path, oracle: Oracle, kind: str) -> None:
    with running(target_dir, kind) as client:
        prompt, goal = greedy_run(oracle)
        ends = (goal[10], goal[15])
        first = min(goal.index(end) for end in ends)
        least = first + 3
        client.submit("stops", prompt, 24, stop_ids=ends, ignore_eos=True)
        client.submit("later", prompt, 24, stop_ids=ends, min_tokens=least, ignore_eos=True)
        client.engine.target.eos_ids = frozenset(ends)
        client.submit("model's own", prompt, 24)
        client.submit("model's own later", prompt, 24, min_tokens=least)
        client.submit("goes on", prompt, 24, ignore_eos=True)
        results = client.wait()
    expected: list[int] = []
    while len(expected) < 24 and not (expected and expected[-1] in ends):
        with torch.no_grad():
            logits = oracle.model(input_ids=torch.tensor([prompt + expected])).logits[0, -1]
        if len(expected) < least:
            logits[list(ends)] = -torch.inf
        expected.append(int(logits.argmax()))
    assert expected[: first + 1] != goal[: first + 1]
    for name in ("stops", "model's own"):
        assert (results[name].tokens, results[name].finish) == (goal[: first + 1], "stop")
    for name in ("later", "model's own later"):
        assert results[name].tokens == expected
    assert (results["goes on"].tokens, results["goes on"].finish) == (goal, "length")


def test_stop_string_after_min_tokens_ends_the_text_before_it(target_dir: Path) -> None:
    prompt, drawn = prompts([6], seed=2)[0], SamplingParams(temperature=1.0, seed=3)
    with running(target_dir, "language_model") as client:

        def ask(name: str, **more: Any) -> Result:
            client.submit(name, prompt, 60, drawn, ignore_eos=True, **more)
            return client.wait()[name]

        whole = ask("whole")
        plain = [i for i in range(8, len(whole.text) - 3) if "\ufffd" not in whole.text[: i + 3][-3:]]
        stop = whole.text[plain[0] : plain[0] + 3]
        cut = ask("cut", stop=("never seen", stop))
        letter = next(letter for letter in whole.text[:20] if letter.isascii() and letter in whole.text[32:50])
        early, later, last = (ask(f"{least}", stop=(letter,), min_tokens=least) for least in (0, 30, 60))
    assert whole.text == tokenizer().decode(whole.tokens, skip_special_tokens=True)
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.tokens) < len(whole.tokens)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(early.tokens) < 30 <= len(later.tokens) < 60 == len(last.tokens)
    assert later.text.count(letter) > 0
    assert whole.text.startswith(later.text + letter)


def test_cancel_ends_a_request_and_frees_its_slot(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "eagle", slots=1) as client:
        prompt, goal = greedy_run(oracle)
        client.submit("running", prompt, 100, ignore_eos=True)
        client.submit("waiting", prompt, 100, ignore_eos=True)
        client.submit("after", prompt, 24, ignore_eos=True)
        client.until("running", 2)
        assert client.engine.load().running == 1
        assert client.engine.load().waiting == 2
        client.engine.cancel("waiting")
        client.engine.cancel("running")
        client.engine.cancel("never heard of")
        results = client.wait()
        assert results["running"].finish == results["waiting"].finish == "cancelled"
        assert 0 < len(results["running"].tokens) < 100
        assert results["waiting"].tokens == []
        assert results["after"].tokens == goal, "the freed slot works"
        counters = client.settled()
        assert (counters.cancelled, counters.finished) == (2, {"length": 1})
        times = {name: sum(histogram.counts) for name, histogram in counters.histograms.by_name.items()}
        assert (times["time_to_first_token"], times["request_time"]) == (2, 1), (
            "cancelled requests count only if they began"
        )
        assert (client.engine.load().running, client.engine.load().waiting) == (0, 0)


@pytest.mark.parametrize("kind", ["eagle", "language_model"])
def test_swap_during_a_request_keeps_its_output(target_dir: Path, oracle: Oracle, kind: str) -> None:
    weights = with_noise(make_drafter(kind, target_dir).weights())
    prompt, began = prompts([9], seed=4)[0], time.perf_counter()
    with running(target_dir, kind) as client:
        client.submit("r", prompt, 90, ignore_eos=True)
        client.until("r", 4)
        client.engine.stage(2, weights)
        result = client.wait()["r"]
        counters = client.engine.counters()
        assert client.engine.drafter_version == 2
    assert result.tokens == oracle.greedy(prompt, 90)
    assert counters.swaps == 1
    assert 0 < counters.swap_stall_seconds_max <= counters.swap_stall_seconds < time.perf_counter() - began
    assert set(counters.by_version) == {("general", 1), ("general", 2)}
    assert sum(counts.drafted for counts in counters.by_version.values()) == result.counts.drafted
    assert counters.by_version["general", 2].acceptance_rate < 0.1, "random weights agree by chance only"


def test_engine_without_drafter_refuses_versions(target_dir: Path) -> None:
    with running(target_dir) as client, pytest.raises(ValueError, match="this engine decodes without a drafter"):
        client.engine.stage(2, {})


def test_failed_step_fails_only_its_requests(target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(target_dir, "eagle", slots=2) as client:
        prompt, goal = greedy_run(oracle)
        healthy, calls = step_module.launch, []

        def fails_once(*arguments: object) -> object:
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no memory")
            return healthy(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "launch", fails_once)
        for name in ("a", "b", "c"):
            client.submit(name, prompt, 24, ignore_eos=True)
        results = client.wait()
        client.engine.check_health()
        failed = client.engine.counters().failed
    assert results["a"].finish == "error"
    assert results["a"].error == "MemoryError while decoding"
    assert results["c"].finish == "length"
    assert results["c"].tokens == goal
    assert failed == sum(result.finish == "error" for result in results.values())


def test_failed_swap_is_reported_and_keeps_requests(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(target_dir, "eagle") as client:
        session = client.engine.pool.default.session  # type: ignore[union-attr]
        tried = threading.Event()

        def broken(staged: object) -> None:
            tried.set()
            raise MemoryError("no memory")

        weights = make_drafter("eagle", target_dir).weights()  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            patched.setattr(session, "load", broken)
            client.submit("r", [1, 2, 3], 100, ignore_eos=True)
            client.engine.stage(2, weights)
            assert tried.wait(HANG_SECONDS)
            assert client.wait()["r"].finish == "length"
        assert client.engine.drafter_version == 1, "a failed swap does not change the reported version"
        assert client.engine.counters().swaps == 0
        general = client.engine.drafters("general")
        assert general.swap_failure(2) == "MemoryError"
        assert general.swap_failure(3) is None
        client.engine.stage(2, weights)
        client.swapped_to(2)
        assert general.swap_failure(2) is None
        client.engine.check_health()


def test_accepted_tokens_after_the_end_are_not_counted(target_dir: Path, oracle: Oracle) -> None:
    whole = initial(LanguageModelSettings(layers=4), target_dir, target_dir)  # nearly always right
    with running(target_dir, "language_model", drafter=whole, depth=8) as client:
        prompt, goal = greedy_run(oracle)
        for end in range(4, 20):
            client.engine.target.eos_ids = frozenset({goal[end]})
            client.submit(f"{end}", prompt, 24, logprobs=0)
            result = client.wait()[f"{end}"]
            assert result.counts.accepted < len(result.tokens) == len(result.logprobs)


@pytest.mark.parametrize(("prompt", "max_tokens", "message"), [
    (100, 29, "the prompt has 100 tokens and max_tokens is 29: together they exceed the context of 128 tokens"),
    (0, 5, "at least one prompt token"),
    (5, 0, "max_tokens of at least 1"),
])  # fmt: skip
def test_submit_beyond_the_context_is_refused(target_dir: Path, prompt: int, max_tokens: int, message: str) -> None:
    with running(target_dir) as client, pytest.raises(ValueError, match=message):
        client.submit("r", [1] * prompt, max_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_request_may_fill_the_whole_context(target_dir: Path, oracle: Oracle, kind: str) -> None:
    prompt = prompts([100], seed=8)[0]
    with running(target_dir, kind, depth=8) as client:
        client.submit("r", prompt, 28, ignore_eos=True)
        assert client.wait()["r"].tokens == oracle.greedy(prompt, 28)


def test_speculation_can_be_disabled_per_request_and_engine(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "eagle") as client:
        client.submit("plain", [1, 2, 3], 20, speculate=False, ignore_eos=True)
        client.submit("switched", [1, 2, 3], 100, ignore_eos=True)
        for tokens, speculates in ((20, False), (60, True)):
            while len(client.results["switched"].tokens) < tokens:
                client.next()
            client.engine.set_speculation(speculates)
        results = client.wait()
        client.engine.set_speculation(False)
        client.submit("later", [1, 2, 3], 20, ignore_eos=True)
        client.wait()
    assert results["switched"].tokens == oracle.greedy([1, 2, 3], 100)
    assert results["plain"].tokens == results["later"].tokens == results["switched"].tokens[:20]
    assert results["plain"].counts.drafted == results["later"].counts.drafted == 0 < results["switched"].counts.drafted


def test_stop_cancels_requests_and_refuses_new_ones(target_dir: Path) -> None:
    with running(target_dir, "eagle", slots=1) as client:
        for name in ("a", "b"):
            client.submit(name, [1, 2, 3], 120, ignore_eos=True)
        client.engine.stop()
        assert {result.finish for result in client.wait().values()} == {"cancelled"}
        assert client.engine.counters().cancelled == 2
        with pytest.raises(ValueError, match="the engine is stopping"):
            client.submit("c", [1], 1)
        with pytest.raises(RuntimeError, match="thread does not run"):
            client.engine.check_health()
