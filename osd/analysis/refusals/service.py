"""Answers of a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from osd.analysis.refusals.answers import AGAIN, PLAIN, Answer, Answers, Plan
from osd.analysis.refusals.endpoint import Endpoint, text_of
from osd.analysis.refusals.failure import RefusalsError
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

    Sampled requests have no seed: with one the text would not depend on what was drafted.

    Raises:
        RefusalsError: the service does not answer, or not as it should.
    """

    def ask(round_name: str, sampling: Mapping[str, Any]) -> list[Answer]:
        bodies = [
            {
                "messages": [{"role": "user", "content": prompt.prompt}],
                "max_tokens": plan.tokens,
                "store": False,
                "osd": osd,
                **sampling,
            }
            for prompt in prompts
        ]
        found = endpoint.ask(bodies, lambda done: report(f"{round_name}: {done} of {len(prompts)} answers"))
        return [_answer(endpoint, completion) for completion in found]

    greedy = ask("greedy", {"temperature": 0, "logprobs": True, "top_logprobs": 2})
    drawn = {"temperature": plan.temperature, "top_p": plan.top_p}
    return Answers(greedy, [ask(f"round {number + 1} of {plan.rounds}", drawn) for number in range(plan.rounds)])


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
