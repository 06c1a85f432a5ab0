"""Answers of a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from osd.analysis.refusals import RefusalsError
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answer, Answers, Plan
from osd.analysis.refusals.endpoint import Endpoint, text_of
from osd.analysis.refusals.prompts import Prompt


def ways(domains: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared, and the field ``osd`` of its requests: the service's own drafts, and those of ``domains``."""
    yield PLAIN, {"speculate": False}
    yield AGAIN, {"speculate": False}
    yield "as served", {}
    for domain in domains:
        yield f"domain {domain}", {"domain": domain}


def answers(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    plan: Plan,
    osd: Mapping[str, Any],
    report: Callable[[str], None] = lambda step: None,
) -> Answers:
    """Send every prompt, greedily and in each round, with ``osd`` in its request; the service learns from none of them.

    Sampled requests have no seed: with one the text would not depend on what was drafted. ``report`` is told what comes
    next.

    Raises:
        RefusalsError: the service does not answer, or not as it should.
    """

    def ask(sampling: Mapping[str, Any]) -> list[Answer]:
        common = {"max_tokens": plan.tokens, "store": False, "osd": osd, **sampling}
        bodies = [{"messages": [{"role": "user", "content": prompt.prompt}], **common} for prompt in prompts]
        return [_answer(endpoint, completion) for completion in endpoint.ask(bodies)]

    report("greedy")
    greedy = ask({"temperature": 0, "logprobs": True, "top_logprobs": 2})
    sampled: list[list[Answer]] = []
    for turn in range(1, plan.rounds + 1):
        report(f"round {turn} of {plan.rounds}")
        sampled.append(ask({"temperature": plan.temperature, "top_p": plan.top_p}))
    return Answers(greedy, sampled)


def _answer(endpoint: Endpoint, completion: Mapping[str, Any]) -> Answer:
    try:
        drafts = completion["metrics"]["speculative_decoding"]
        drafted, accepted = int(drafts["num_draft_tokens"]), int(drafts["num_accepted_draft_tokens"])
        places = (completion["choices"][0]["logprobs"] or {"content": []})["content"]
        tokens = [str(place["token"]) for place in places]
        tops = [[float(one["logprob"]) for one in place["top_logprobs"]] for place in places]
        gaps = [top[0] - top[1] for top in tops]
    except (LookupError, TypeError, ValueError):
        raise RefusalsError(f"{endpoint.name} at {endpoint.url} does not answer as osd does") from None
    return Answer(tokens, text_of(completion) or "", gaps, drafted, accepted)
