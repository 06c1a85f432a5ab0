"""Conversion of exchanges to token ids with the target's tokenizer and chat template."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from osd.capture.exchange import Chat, Exchange
from osd.capture.trace import TraceError


@dataclass(frozen=True)
class Reading:
    """Exchange with its prompt and completion as token ids of the target."""

    exchange: Exchange
    prompt: list[int]
    completion: list[int]


class Renderer:
    """Renderer of exchanges as token ids.

    The text of an answer is tokenized by the target's tokenizer. The tokens can differ from the tokens that the server
    sampled; the drafter learns the tokens of the target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], vocabulary: int) -> None:
        """Render with the target's tokenizer.

        Args:
            tokenizer: tokenizer of the target.
            eos_ids: ids that end a text.
            vocabulary: size of the vocabulary.
        """
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        eos: Any = tokenizer.eos_token_id
        self._end = eos if eos in eos_ids else min(eos_ids, default=None)
        self._mark = "" if self._end is None else str(tokenizer.convert_ids_to_tokens(self._end))
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) - {"kwargs"}

    def read(self, exchange: Exchange) -> Reading:
        """Convert an exchange to token ids.

        Raises:
            TraceError: the chat template rejects the exchange, or its prompt or answer is empty.
        """
        chat = exchange.conversation
        if chat is None:
            prompt, answer = self._prompt_ids(exchange), exchange.answer
        else:
            text = self._render(chat, chat.messages, begins=True)
            prompt = self._ids(text, special=False)
            answer = self._render_calls(exchange, chat, text) if exchange.calls else exchange.answer
        completion = self._ids(answer, special=False)
        if exchange.ended and self._end is not None:
            completion.append(self._end)
        if not prompt or not completion or not all(0 <= token < self._vocabulary for token in prompt):
            raise TraceError("its prompt or its answer is empty or invalid in the target's tokens")
        return Reading(exchange, prompt, completion)

    def _prompt_ids(self, exchange: Exchange) -> list[int]:
        prompt = exchange.prompt
        return self._ids(prompt, special=True) if isinstance(prompt, str) else prompt

    def _render_calls(self, exchange: Exchange, chat: Chat, prompt: str) -> str:
        """Return the text of an answer with function calls, which servers return as parsed objects."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.parsed}}
            for call in exchange.calls
        ]
        turn = {"role": "assistant", "content": exchange.answer, "tool_calls": calls}
        text = self._render(chat, [*chat.messages, turn], begins=False)
        if not text.startswith(prompt):
            raise TraceError("the chat template changes the prompt when the answer has function calls")
        answer = text[len(prompt) :]
        return (answer.partition(self._mark)[0] if self._mark else answer).rstrip()

    def _render(self, chat: Chat, messages: list[dict[str, Any]], begins: bool) -> str:
        if self._reserved & chat.options.keys():
            raise TraceError("its chat_template_kwargs contain arguments of the tokenizer")
        try:
            tools: Any = chat.tools or None  # transformers has a narrower type for its lists
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=begins, tokenize=False, **chat.options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TraceError(f"the chat template rejects it: {type(error).__name__}") from None
        return str(text)

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
