"""Answers of a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from osd.analysis.refusals import EndpointError
from osd.analysis.refusals.answers import AGAIN, PLAIN, Answers, ModelAnswer, SamplingPlan
from osd.analysis.refusals.endpoint import Endpoint, text_of
from osd.analysis.refusals.prompts import RefusalPrompt


def ways(domains: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way and the field ``osd`` of its requests: the default drafter, and the drafter of each domain."""
    yield PLAIN, {"speculate": False}
    yield AGAIN, {"speculate": False}
    yield "as served", {}
    for domain in domains:
        yield f"domain {domain}", {"domain": domain}


def answers(
    endpoint: Endpoint,
    prompts: Sequence[RefusalPrompt],
    plan: SamplingPlan,
    osd: Mapping[str, Any],
    report: Callable[[str], None] = lambda step: None,
) -> Answers:
    """Send every prompt with greedy decoding and with sampling in each round; the service does not learn from them.

    Sampled requests have no seed, because with a seed the text does not depend on drafts.

    Args:
        endpoint: the service.
        prompts: prompts to send.
        plan: sampling settings.
        osd: field ``osd`` of each request.
        report: called with a description of each step.

    Raises:
        EndpointError: the service does not answer, or its answer is not in the format of osd.
    """

    def ask(sampling: Mapping[str, Any]) -> list[ModelAnswer]:
        common = {"max_tokens": plan.tokens, "store": False, "osd": osd, **sampling}
        bodies = [{"messages": [{"role": "user", "content": prompt.prompt}], **common} for prompt in prompts]
        return [_answer(endpoint, completion) for completion in endpoint.ask(bodies)]

    report("greedy")
    greedy = ask({"temperature": 0, "logprobs": True, "top_logprobs": 2})
    sampled: list[list[ModelAnswer]] = []
    for turn in range(1, plan.rounds + 1):
        report(f"round {turn} of {plan.rounds}")
        sampled.append(ask({"temperature": plan.temperature, "top_p": plan.top_p}))
    return Answers(greedy, sampled)


def _answer(endpoint: Endpoint, completion: Mapping[str, Any]) -> ModelAnswer:
    try:
        drafts = completion["metrics"]["speculative_decoding"]
        drafted, accepted = int(drafts["num_draft_tokens"]), int(drafts["num_accepted_draft_tokens"])
        places = (completion["choices"][0]["logprobs"] or {"content": []})["content"]
        tokens = [str(place["token"]) for place in places]
        tops = [[float(entry["logprob"]) for entry in place["top_logprobs"]] for place in places]
        gaps = [top[0] - top[1] for top in tops]
    except (LookupError, TypeError, ValueError):
        raise EndpointError(f"{endpoint.name} at {endpoint.url} does not answer in the format of osd") from None
    return ModelAnswer(tokens, text_of(completion) or "", gaps, drafted, accepted)
