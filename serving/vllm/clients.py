"""Rights of clients inside vLLM: separate prefix caches, and charges for tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from serving.access.budgets import Budgets
from serving.access.keys import Caller

caller: ContextVar[Caller | None] = ContextVar("osd_caller", default=None)
"""Sender of the request that runs in this context."""

_SALT, _DELTA = "cache_salt", "DELTA"


def attach(engine: Any, budgets: Budgets) -> None:
    """Let vLLM's client of its engine separate the cached prompts of clients, and charge tokens to their keys."""
    generate = engine.generate

    def generating(prompt: Any, params: Any, *args: Any, **options: Any) -> AsyncGenerator[Any]:
        sender = caller.get()
        if sender is None:
            return generate(prompt, params, *args, **options)
        if sender.client and isinstance(prompt, dict):
            prompt = {**prompt, _SALT: f"{sender.client}{prompt.get(_SALT) or ''}"}
        answers = generate(prompt, params, *args, **options)
        is_counted = sender.key is not None and sender.key.limits
        return _charged(answers, sender, budgets, params.output_kind.name == _DELTA) if is_counted else answers

    engine.generate = generating


async def _charged(
    answers: AsyncGenerator[Any], sender: Caller, budgets: Budgets, is_delta: bool
) -> AsyncGenerator[Any]:
    """Yield ``answers``, and charge the tokens of the prompt and of each answer when they arrive.

    Args:
        answers: outputs of a request.
        sender: the sender of the request.
        budgets: budgets of the keys.
        is_delta: whether an output has only the tokens since the output before it.
    """
    counted: dict[int, int] = {}
    is_charged = False
    try:
        async for answer in answers:
            tokens = 0 if is_charged else len(answer.prompt_token_ids or ())
            is_charged = True
            for choice in answer.outputs:
                new = len(choice.token_ids)
                before = counted.get(choice.index, 0)
                counted[choice.index] = before + new if is_delta else new
                tokens += counted[choice.index] - before
            budgets.charge(sender.key, tokens)
            yield answer
    finally:
        await answers.aclose()  # a client that leaves ends its request now, not at the next collection
