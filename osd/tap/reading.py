"""From the bytes of a request and its answer to exchanges, where policy allows that they are kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec

from osd.capture.exchange import Chat, Exchange, FunctionCall
from osd.config import Settings
from osd.tap.answers import Answer, AnswerError, Choice, read_answer, read_events
from osd.tap.metrics import Reason

if TYPE_CHECKING:
    from osd.tap.agreement import Served


@dataclass
class Copy:
    """A request and its answer on their way, up to ``limit`` bytes of each."""

    chat: bool
    limit: int
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)
    status: int = 0
    request_encoding: str = ""
    headers: httpx2.Headers = field(default_factory=httpx2.Headers)
    whole: bool = False
    too_large: bool = False

    def request(self, part: bytes) -> None:
        """Take in a part of the request's body."""
        self._add(self.asked, part)

    def begin(self, asked: Sequence[tuple[bytes, bytes]], status: int, headers: httpx2.Headers) -> None:
        """Take in the head of the answer, and of the request what says how its body is written."""
        self.request_encoding = next((v.decode("latin-1") for name, v in asked if name == b"content-encoding"), "")
        self.status, self.headers = status, headers

    def answer(self, part: bytes) -> None:
        """Take in a part of the answer's body."""
        self._add(self.answered, part)

    def _add(self, to: bytearray, part: bytes) -> None:
        if len(to) + len(part) > self.limit:
            self.too_large = True
            to.clear()
        if not self.too_large:
            to += part


_EVENTS = "text/event-stream"
_ROLES = {"developer": "system"}  # chat templates know the older name
_OTHER_PROMPTS = frozenset(
    {"chat_template", "continue_final_message", "documents", "echo", "functions", "prompt_embeds", "suffix"}
    | {"mm_processor_kwargs", "media_io_kwargs", "audio", "response_role"}
)
"""Fields that make another prompt of the same words, or put it into the answer."""
_SAMPLING = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0}


class PassedOver(Exception):
    """An answer is not captured, for a ``reason``."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def exchanges_of(copy: Copy, settings: Settings, served: Served) -> Iterator[Exchange]:
    """The exchanges of one answer, one for each of its choices that is text or calls of functions.

    Raises:
        PassedOver: it is not captured.
    """
    if copy.too_large:
        raise PassedOver("size")
    if not copy.whole:
        raise PassedOver("unfinished")
    if copy.status != 200:
        raise PassedOver("status")
    asked = _json(bytes(copy.asked)) if copy.request_encoding in ("", "identity") else None
    if not isinstance(asked, dict):
        raise PassedOver("unreadable")
    store = asked.get("store")
    if not (settings.serving.capture_default if store is None else store is True):
        raise PassedOver("policy")
    if asked.get("model") is not None and asked["model"] not in served.names:
        raise PassedOver("model")
    try:
        answer = _answer(copy)
    except AnswerError:
        raise PassedOver("unreadable") from None
    prompts = _prompts(copy.chat, asked)
    choices = [choice for choice in answer.choices if choice.plain]
    if not choices:
        raise PassedOver("form")
    several = max(int(asked.get("n") or 1), 1)
    name = answer.id or f"tapped-{uuid.uuid4().hex}"
    temperature, top_k, top_p = (_number(asked, field, usual) for field, usual in _SAMPLING.items())
    for choice in choices:
        if choice.index // several >= len(prompts):
            raise PassedOver("unreadable")
        prompt = prompts[choice.index // several]
        yield Exchange(
            request_id=f"{name}-{choice.index}",
            created=time.time(),
            domain=settings.domain,
            target=settings.target.source,
            temperature=temperature,
            top_k=max(int(top_k), 0),
            top_p=top_p,
            chat=prompt if copy.chat else b"",
            text=b"" if copy.chat else prompt,
            answer=choice.text,
            calls=tuple(FunctionCall(**call) for call in choice.calls),
            ended=_ended(choice, asked),
        )


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return None


def _number(asked: dict[str, Any], field: str, usual: float) -> float:
    value = asked.get(field)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else usual


def _answer(copy: Copy) -> Answer:
    try:
        # The client's own decoders: gzip, deflate, and what else is installed.
        headers = [(name, copy.headers[name]) for name in ("content-encoding",) if name in copy.headers]
        data = httpx2.Response(200, headers=headers, content=bytes(copy.answered)).content
    except httpx2.DecodingError:
        raise AnswerError("it is not written as it says") from None
    return read_events(data) if copy.headers.get("content-type", "").startswith(_EVENTS) else read_answer(data)


def _ended(choice: Choice, asked: dict[str, Any]) -> bool:
    """Whether the model ended by itself: vLLM says which string or token ended it, others say nothing."""
    by_itself = choice.tells_stop or not (asked.get("stop") or asked.get("stop_token_ids"))
    return choice.finished in ("stop", "tool_calls") and choice.stopped_at is None and by_itself


def _prompts(chat: bool, asked: dict[str, Any]) -> list[bytes]:
    """What is answered, as JSON: one chat, or each of several texts."""
    if any(asked.get(name) for name in _OTHER_PROMPTS) or asked.get("add_generation_prompt") is False:
        raise PassedOver("form")
    if chat:
        return [msgspec.json.encode(_chat(asked))]
    prompt = asked.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise PassedOver("form")
    return [msgspec.json.encode(one) for one in prompt]


def _chat(asked: dict[str, Any]) -> Chat:
    messages, tools, options = asked.get("messages"), asked.get("tools"), asked.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages or asked.get("reasoning_effort") not in (None, "none"):
        raise PassedOver("form")
    if tools and asked.get("tool_choice") == "none":  # servers differ in whether the prompt names them
        raise PassedOver("form")
    return Chat([_turn(message) for message in messages], tools or [], options or {})


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("reasoning_content") or message.get("reasoning"):
        raise PassedOver("form")
    content = message.get("content")
    if isinstance(content, list):
        # Of several parts, templates and servers make different texts.
        if len(content) != 1 or not isinstance(content[0], dict) or not isinstance(content[0].get("text"), str):
            raise PassedOver("form")
        content = content[0]["text"]
    if not isinstance(content, str | None):
        raise PassedOver("form")
    role = message.get("role")
    turn = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content or ""}
    if message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return turn | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _call(call: Any) -> dict[str, Any]:
    """A call in an earlier answer, with its arguments as an object: so do servers give it to templates."""
    try:
        function = call["function"]
        arguments = _json(function["arguments"].encode())
        given = {"name": function["name"], "arguments": function["arguments"] if arguments is None else arguments}
        return {"id": call.get("id", ""), "type": "function", "function": given}
    except (AttributeError, KeyError, TypeError):
        raise PassedOver("form") from None
