"""Rights of clients inside vLLM: separate prefix caches, priorities, and charges for tokens."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from serving.access.budgets import Budgets
from serving.access.keys import MOST_PRIORITY, Caller, Key

logger = logging.getLogger(__name__)

PRIORITY_ADVICE = "add --scheduling-policy priority to engine.vllm.args, or remove it"
"""What to do about a priority in ``serving.keys_file`` that vLLM ignores."""

caller: ContextVar[Caller | None] = ContextVar("osd_caller", default=None)
"""Sender of the request that runs in this context."""

_SALT, _DELTA, _PRIORITY = "cache_salt", "DELTA", "priority"


def attach(engine: Any, budgets: Budgets, has_priorities: bool) -> None:
    """Let vLLM's client of its engine apply the rights of clients to each request.

    The cached prompts of clients are separate, tokens are charged to keys, and the priority of a key is added to that
    of its request.

    Args:
        engine: vLLM's client of its engine.
        budgets: budgets of the keys.
        has_priorities: whether vLLM schedules by priority.
    """
    generate, priorities = engine.generate, _Priorities(has_priorities)

    def generating(prompt: Any, params: Any, *args: Any, **options: Any) -> AsyncGenerator[Any]:
        sender = caller.get()
        if sender is None:
            return generate(prompt, params, *args, **options)
        if sender.client and isinstance(prompt, dict):
            prompt = {**prompt, _SALT: f"{sender.client}{prompt.get(_SALT) or ''}"}
        if sender.key is not None:
            options[_PRIORITY] = priorities.sum(sender.key, options.get(_PRIORITY) or 0)
        answers = generate(prompt, params, *args, **options)
        is_counted = sender.key is not None and sender.key.limits
        return _charged(answers, sender, budgets, params.output_kind.name == _DELTA) if is_counted else answers

    engine.generate = generating


class _Priorities:
    """Priorities of requests in a vLLM that ``schedules`` by them or not."""

    def __init__(self, schedules: bool) -> None:
        self._schedules = schedules
        self._ignored: set[str] = set()

    def sum(self, key: Key, requested: int) -> int:
        """Return the priority of a request; log a warning once for a key whose priority vLLM ignores.

        As in our own engine, a client can choose only from 0 on, so that it cannot pass requests of other keys.
        """
        if key.priority and not self._schedules and key.name not in self._ignored:
            self._ignored.add(key.name)
            logger.warning("the priority of key %s has no effect: %s", key.name, PRIORITY_ADVICE)
        return key.priority + min(max(requested, 0), MOST_PRIORITY)


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
