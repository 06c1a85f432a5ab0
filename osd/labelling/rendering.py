"""Exchanges as token ids: prompts by the target's chat template, answers as the target would have written them."""

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
    """What the target reads of an exchange."""

    exchange: Exchange
    prompt: list[int]
    completion: list[int]


class Renderer:
    """Renders with the tokenizer of a target, whose texts end with ``eos_ids`` and whose ids are below ``vocabulary``.

    An answer is tokenized anew: where the server drew its tokens in other pieces, those that are learnt from are the
    pieces in which the target would read it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        own: Any = tokenizer.eos_token_id
        self._end = own if own in eos_ids else min(eos_ids, default=None)
        self._mark = "" if self._end is None else str(tokenizer.convert_ids_to_tokens(self._end))
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._taken = frozenset(parameters) - {"kwargs"}

    def read(self, exchange: Exchange) -> Reading:
        """The token ids of one exchange.

        Raises:
            TraceError: the chat template does not take it, or it has no prompt or no answer.
        """
        chat = exchange.conversation
        if chat is None:
            prompt, said = self._text(exchange), exchange.answer
        else:
            text = self._rendered(chat, chat.messages, begins=True)
            prompt = self._ids(text, special=False)
            said = self._called(exchange, chat, text) if exchange.calls else exchange.answer
        completion = self._ids(said, special=False)
        if exchange.ended and self._end is not None:
            completion.append(self._end)
        if not prompt or not completion or not all(0 <= token < self._vocabulary for token in prompt):
            raise TraceError("it has no prompt or no answer in the target's tokens")
        return Reading(exchange, prompt, completion)

    def _text(self, exchange: Exchange) -> list[int]:
        prompt = exchange.prompt
        return self._ids(prompt, special=True) if isinstance(prompt, str) else prompt

    def _called(self, exchange: Exchange, chat: Chat, prompt: str) -> str:
        """How the template writes an answer that calls functions, which servers took apart."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.parsed}}
            for call in exchange.calls
        ]
        turn = {"role": "assistant", "content": exchange.answer, "tool_calls": calls}
        text = self._rendered(chat, [*chat.messages, turn], begins=False)
        if not text.startswith(prompt):
            raise TraceError("the chat template writes calls elsewhere than where the answer begins")
        said = text[len(prompt) :]
        return (said.partition(self._mark)[0] if self._mark else said).rstrip()

    def _rendered(self, chat: Chat, messages: list[dict[str, Any]], begins: bool) -> str:
        if self._taken & chat.options.keys():
            raise TraceError("its options are no variables of a chat template")
        try:
            given: Any = chat.tools or None  # transformers has a narrower type for its lists
            text = self._tokenizer.apply_chat_template(
                messages, tools=given, add_generation_prompt=begins, tokenize=False, **chat.options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TraceError(f"the chat template does not take it: {type(error).__name__}") from None
        return str(text)

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
