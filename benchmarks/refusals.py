"""Answers of our own engine to prompts that should be refused, with each drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks import engines, streams
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answers, ModelAnswer, SamplingPlan
from osd.analysis.refusals.prompts import RefusalPrompt
from osd.cli.report import say
from osd.config import Settings
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.traffic.prompt import Prompt as Conversation

_CHANGE = 0.5  # noise in the weights of the second version, in standard deviations of each tensor
_SECOND_VERSION = 2  # engines start with version 1
_SWAP_SECONDS = 60.0


def answers(
    settings: Settings, prompts: Sequence[RefusalPrompt], drafts: Sequence[str], plan: SamplingPlan
) -> dict[str, Answers]:
    """Answer all prompts plainly twice, with each drafter, and with a second version of each drafter.

    The second version is swapped in while the first answers are decoded. Drafters with a memory learn from the answers,
    so that they draft earlier answers. Each answer is sampled with its own seed. ``drafts`` are names from
    ``benchmarks.engines.DRAFTS`` or ``RECALLING``. A target in float32 makes rounding differences rare.

    Raises:
        BenchError: a prompt is too long, a drafter does not exist, or its second version was not loaded in time.
    """
    for kind in drafts:
        engines.check_draft(kind, recalling=True)
    with engines.loading():
        return dict(_answers(settings, prompts, drafts, plan))


def _answers(
    settings: Settings, prompts: Sequence[RefusalPrompt], drafts: Sequence[str], plan: SamplingPlan
) -> Iterator[tuple[str, Answers]]:
    seeds = count()  # the draws of an answer depend on the seed only
    engine, directory = engines.plain_engine(settings)
    token_ids = _encoded(engine.tokenizer, prompts, engine.target.context - plan.tokens)
    with engines.running(engine):
        for way in (PLAIN, AGAIN):
            yield way, _answer(engine, way, token_ids, plan, seeds)
    for kind in drafts:
        del engine  # two targets may not fit in memory
        drafter, _ = engines.find_drafter(settings, kind, directory)
        engine = engines.engine_with(settings, directory, drafter)
        with engines.running(engine):
            yield kind, _answer(engine, kind, token_ids, plan, seeds)
            if weights := change_weights(drafter.weights()):
                way = f"{kind}, swapped"
                yield way, _answer(engine, way, token_ids, plan, seeds, weights)


def change_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that draft differently: noise is added to every floating-point tensor."""
    generator = torch.Generator().manual_seed(1)

    def noisy(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return (tensor.float() + _CHANGE * tensor.float().std(correction=0) * noise).to(tensor.dtype)

    return {name: noisy(value) if value.is_floating_point() else value for name, value in weights.items()}


def _encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[RefusalPrompt], limit: int) -> list[tuple[int, ...]]:
    encoded = []
    for prompt in prompts:
        ids = engines.encode(tokenizer, [Conversation(str(prompt.pid), "refusals", (prompt.prompt,))], limit)
        if not ids:
            raise engines.BenchError(
                f"prompt pid {prompt.pid} has more than the {limit} tokens that engine.context leaves"
            )
        encoded += ids
    return encoded


def _answer(
    engine: Engine,
    way: str,
    prompts: Sequence[tuple[int, ...]],
    plan: SamplingPlan,
    seeds: Iterator[int],
    version: dict[str, Tensor] | None = None,
) -> Answers:
    """Answer greedily, then sample ``plan.rounds`` times; stage the weights of ``version`` at the first update."""

    def send(turn: int, sampling: SamplingParams, on_first: Callable[[], None] = lambda: None) -> list[ModelAnswer]:
        requests = [
            Request(
                f"{way}-{turn}-{index}", prompt, plan.tokens, replace(sampling, seed=next(seeds)),
                speculate=way not in (PLAIN, AGAIN), logprobs=2 if way == PLAIN and not turn else None, capture=True,
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        results = streams.answers_of(engine, requests, on_first)
        return [_model_answer(results[request.id]) for request in requests]

    say(f"{way}: greedy")
    if version is None:
        greedy = send(0, SamplingParams(temperature=0))
    else:
        greedy = send(0, SamplingParams(temperature=0), lambda: engine.stage(_SECOND_VERSION, version))
        _await_swap(engine)
    sampled = []
    for turn in range(1, plan.rounds + 1):
        say(f"{way}: round {turn} of {plan.rounds}")
        sampled.append(send(turn, SamplingParams(temperature=plan.temperature, top_p=plan.top_p)))
    return Answers(greedy, sampled)


def _model_answer(result: streams.RequestResult) -> ModelAnswer:
    return ModelAnswer(result.tokens, result.text, result.gaps, result.counts.drafted, result.counts.accepted)


def _await_swap(engine: Engine) -> None:
    deadline = time.monotonic() + _SWAP_SECONDS
    while engine.drafter_version != _SECOND_VERSION:
        if time.monotonic() > deadline:
            raise engines.BenchError(f"the drafter's second version was not swapped in within {_SWAP_SECONDS:g} s")
        time.sleep(0.01)
