"""Answers of engines of our own, one for each drafter, to prompts that should be refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks import streams
from benchmarks.engines import (
    BenchError,
    check_draft,
    encode,
    engine_with,
    find_drafter,
    loading,
    plain_engine,
    running,
)
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answers, ModelAnswer, SamplingPlan
from osd.analysis.refusals.prompts import RefusalPrompt
from osd.cli.report import say
from osd.config import Settings
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.traffic.prompt import Prompt as Conversation

_CHANGE = 0.5  # of another version's weights, in standard deviations of each tensor
_OTHER = 2  # the number of that version; engines begin with 1
_SWAP_SECONDS = 60.0


def answers(
    settings: Settings, prompts: Sequence[RefusalPrompt], drafts: Sequence[str], plan: SamplingPlan
) -> dict[str, Answers]:
    """Answer all prompts in every way: plainly, plainly again, with each drafter, and with another version of it.

    The other version is swapped in while the first answers are decoded. Drafters that remember do, so that they draft
    what was answered before. Each answer is drawn with a seed of its own.

    Args:
        settings: Settings of the engines; with a target in float32 rounding turns few tokens around.
        prompts: With ``plan.tokens`` they must fit the context.
        drafts: Of ``benchmarks.engines.DRAFTS`` or ``RECALLING``.
        plan: Numbers of tokens and of sampled answers.

    Raises:
        BenchError: a prompt is too long, there is no such drafter, or its other version is not taken.
    """
    for kind in drafts:
        check_draft(kind, recalling=True)
    with loading():
        return dict(_answers(settings, prompts, drafts, plan))


def _answers(
    settings: Settings, prompts: Sequence[RefusalPrompt], drafts: Sequence[str], plan: SamplingPlan
) -> Iterator[tuple[str, Answers]]:
    seeds = count()  # the seed alone keys the draws of an answer
    engine, directory = plain_engine(settings)
    asked = _encoded(engine.tokenizer, prompts, settings.engine.context - plan.tokens)
    with running(engine):
        for way in (PLAIN, AGAIN):
            yield way, _answer(engine, way, asked, plan, seeds)
    for kind in drafts:
        del engine  # two targets may be too many for the memory
        drafter, _ = find_drafter(settings, kind, directory)
        engine = engine_with(settings, directory, drafter)
        with running(engine):
            yield kind, _answer(engine, kind, asked, plan, seeds)
            if weights := changed(drafter.weights()):
                way = f"{kind}, swapped"
                yield way, _answer(engine, way, asked, plan, seeds, weights)


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a version that drafts otherwise: noise is added to every number that is not whole."""
    generator = torch.Generator().manual_seed(1)

    def noisy(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return (tensor.float() + _CHANGE * tensor.float().std(correction=0) * noise).to(tensor.dtype)

    return {name: noisy(one) if one.is_floating_point() else one for name, one in weights.items()}


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[RefusalPrompt], longest: int
) -> list[tuple[int, ...]]:
    asked = []
    for prompt in prompts:
        ids = encode(tokenizer, [Conversation(str(prompt.pid), "refusals", (prompt.prompt,))], longest)
        if not ids:
            raise BenchError(
                f"the prompt with pid {prompt.pid} has more than the {longest} tokens that the context leaves"
            )
        asked += ids
    return asked


def _answer(
    engine: Engine,
    way: str,
    prompts: Sequence[tuple[int, ...]],
    plan: SamplingPlan,
    seeds: Iterator[int],
    version: dict[str, Tensor] | None = None,
) -> Answers:
    """Answer greedily and then in rounds; weights of another ``version`` come in once the first answer has begun."""

    def ask(turn: int, sampling: SamplingParams, meanwhile: Callable[[], None] = lambda: None) -> list[ModelAnswer]:
        requests = [
            Request(
                f"{way}-{turn}-{index}", prompt, plan.tokens, replace(sampling, seed=next(seeds)),
                speculate=way not in (PLAIN, AGAIN), logprobs=2 if way == PLAIN and not turn else None, capture=True,
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        found = streams.answers_of(engine, requests, meanwhile)
        return [_told(found[request.id]) for request in requests]

    say(f"{way}: greedy")
    if version is None:
        greedy = ask(0, SamplingParams(temperature=0))
    else:
        greedy = ask(0, SamplingParams(temperature=0), lambda: engine.stage(_OTHER, version))
        _await_swap(engine)
    sampled = []
    for turn in range(1, plan.rounds + 1):
        say(f"{way}: round {turn} of {plan.rounds}")
        sampled.append(ask(turn, SamplingParams(temperature=plan.temperature, top_p=plan.top_p)))
    return Answers(greedy, sampled)


def _told(answer: streams.Answer) -> ModelAnswer:
    return ModelAnswer(answer.tokens, answer.text, answer.gaps, answer.counts.drafted, answer.counts.accepted)


def _await_swap(engine: Engine) -> None:
    deadline = time.monotonic() + _SWAP_SECONDS
    while engine.drafter_version != _OTHER:
        if time.monotonic() > deadline:
            raise BenchError(f"another version of the drafter was not swapped in within {_SWAP_SECONDS:g} s")
        time.sleep(0.01)
