"""Sampling settings of OpenAI and vLLM for whole requests, with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.engine.request import SamplingParams
from tests.unit.engine.harness import Oracle, Result, prompts, running, tokens_of, weights_of
from tests.unit.verification.test_penalties import written_out

KINDS = ["none", "eagle", "language_model"]
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=77, repeatable=True)
STRONG = SamplingParams(
    temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.4,
    logit_bias=((65, 4.0), (66, -100.0)),
)  # fmt: skip


def penalised_reference(model: Any, prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    """Return the greedy answer by penalised logits, one token at a time."""
    output: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + output])).logits[0, -1]
        scores = written_out(logits.tolist(), list(range(len(logits))), sampling, prompt, output)
        output.append(int(scores.argmax()))
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_penalised_greedy_output_matches_the_reference(target_dir: Path, oracle: Oracle, kind: str) -> None:
    texts = prompts([12, 1, 30], seed=3)
    with running(target_dir, kind) as client:
        client.submit("plain", texts[0], 24, ignore_eos=True)
        strong = client.ask(texts, 24, sampling=STRONG)
        results = client.results
    assert tokens_of(strong) == [penalised_reference(oracle.model, prompt, 24, STRONG) for prompt in texts]
    assert results["plain"].tokens == oracle.greedy(texts[0], 24)
    if kind != "none":
        counts = [result.counts for result in results.values()]
        assert all(c is not None and 0 < c.accepted < c.drafted for c in counts), (
            "both accepted and rejected tokens occur"
        )


def decode(directory: Path, kind: str, prompt: list[int], sampling: SamplingParams = SEEDED, **more: Any) -> Result:
    request = {name: more.pop(name) for name in ("speculate", "logprobs") if name in more}
    with running(directory, kind, **more) as client:
        client.submit("r", prompt, 40, sampling, ignore_eos=True, **request)
        return client.wait()["r"]


def test_seeded_text_does_not_depend_on_drafts_batch_or_swap(target_dir: Path) -> None:
    prompt = prompts([21], seed=6)[0]
    goal = decode(target_dir, "none", prompt).tokens
    assert decode(target_dir, "language_model", prompt, governed=True).tokens == goal
    whole = replace(SEEDED, top_p=1.0)
    with running(target_dir, "language_model", slots=4) as client:
        for index, other in enumerate(prompts([30, 2, 11, 7, 25])):
            settings = SamplingParams(temperature=0.5 * index, seed=index, repeatable=index % 2 == 0)
            client.submit(f"other {index}", other, 10 + 3 * index, settings, ignore_eos=True)
            if index == 2:
                client.submit("crowd", prompt, 40, SEEDED, ignore_eos=True)
                client.submit("whole", prompt, 40, whole, ignore_eos=True)
        client.submit("other seed", prompt, 40, replace(SEEDED, seed=78), ignore_eos=True)
        client.until("crowd", 1)
        client.engine.stage(2, weights_of("language_model", target_dir, 1.0))
        results = client.wait()
        assert client.engine.counters().swaps == 1
    assert results["crowd"].tokens == goal != results["other seed"].tokens
    assert results["whole"].tokens == decode(target_dir, "none", prompt, whole).tokens


def raw_logp(oracle: Oracle, prompt: list[int], tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits = oracle.model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling", [STRONG, SamplingParams(0.6, top_k=5, seed=1), SEEDED], ids=["greedy", "drawn", "seed"]
)
def test_logprobs_ignore_sampling_settings(target_dir: Path, oracle: Oracle, kind: str, sampling: SamplingParams):
    texts = prompts([9, 37], seed=8)
    with running(target_dir, kind) as client:
        for top, prompt in enumerate(texts):
            client.submit(str(top), prompt, 30, sampling, ignore_eos=True, logprobs=3 * top)
        client.submit("silent", texts[0], 5, sampling, ignore_eos=True)
        results = client.wait()
    assert results["silent"].logprobs == []
    for top, prompt in enumerate(texts):
        result = results[str(top)]
        assert [place.token for place in result.logprobs] == result.tokens
        logp = raw_logp(oracle, prompt, result.tokens)
        best = logp.topk(3 * top, -1)
        for at, place in enumerate(result.logprobs):
            assert place.logprob == pytest.approx(float(logp[at, place.token]), abs=1e-3)
            assert [token for token, _ in place.top] == best.indices[at].tolist()
            assert [value for _, value in place.top] == pytest.approx(best.values[at].tolist(), abs=1e-3)


def test_unseeded_requests_keep_the_configured_rule(target_dir: Path) -> None:
    prompt, neighbours = prompts([21], seed=6)[0], prompts([5, 8], seed=7)
    free = SamplingParams(temperature=1.0, seed=9)
    alone = decode(target_dir, "language_model", prompt, free)
    with running(target_dir, "language_model") as client:
        client.submit("r", prompt, 40, free, ignore_eos=True)
        for index, other in enumerate(neighbours):
            client.submit(str(index), other, 60, SEEDED, ignore_eos=True)
        batched = client.wait()["r"]
    assert batched.tokens == alone.tokens
    assert batched.counts == alone.counts
    assert decode(target_dir, "language_model", prompt, replace(free, repeatable=True)).tokens != alone.tokens
