"""Conversion of a copied request and its answer to exchanges, if the policy allows capture."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec

from osd.capture.exchange import Chat, Exchange, FunctionCall
from osd.config import Settings
from osd.nesting import NestingError, check_nesting
from osd.tap.answers import AnswerError, UpstreamAnswer, UpstreamChoice, read_answer, read_events
from osd.tap.metrics import Reason

if TYPE_CHECKING:
    from osd.tap.agreement import ServedTarget


@dataclass
class Copy:
    """Copy of a request and its answer, up to ``limit`` bytes each; ``complete`` is set at the end of the answer."""

    chat: bool
    limit: int
    request_body: bytearray = field(default_factory=bytearray)
    answer_body: bytearray = field(default_factory=bytearray)
    status: int = 0
    request_encoding: str = ""
    headers: httpx2.Headers = field(default_factory=httpx2.Headers)
    complete: bool = False
    too_large: bool = False

    def request(self, part: bytes) -> None:
        """Add a part of the request's body."""
        self._add(self.request_body, part)

    def begin(self, request_headers: Sequence[tuple[bytes, bytes]], status: int, headers: httpx2.Headers) -> None:
        """Set the encoding of the request's body, and the status and headers of the answer."""
        encodings = (value.decode("latin-1") for name, value in request_headers if name == b"content-encoding")
        self.request_encoding = next(encodings, "")
        self.status, self.headers = status, headers

    def answer(self, part: bytes) -> None:
        """Add a part of the answer's body."""
        self._add(self.answer_body, part)

    def _add(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self.limit:
            self.too_large = True
            body.clear()
        if not self.too_large:
            body += part


_EVENTS = "text/event-stream"
_ANY_HEADER = zlib.MAX_WBITS | 32  # detects the headers of gzip and zlib
_ROLES = {"developer": "system"}  # chat templates use the older name
_OTHER_PROMPTS = frozenset(
    {"chat_template", "continue_final_message", "documents", "echo", "functions", "prompt_embeds", "suffix"}
    | {"mm_processor_kwargs", "media_io_kwargs", "audio", "response_role"}
)
"""Fields that change the prompt in ways that cannot be reproduced, or copy it into the answer."""
_SAMPLING = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0}


class NotCapturedError(Exception):
    """Refusal to capture an answer; ``reason`` is a label of the metric."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def exchanges_of(copy: Copy, settings: Settings, served: ServedTarget) -> Iterator[Exchange]:
    """Yield an exchange for each choice of an answer that consists of text and function calls.

    Raises:
        NotCapturedError: the answer is not captured.
    """
    if copy.too_large:
        raise NotCapturedError("size")
    if not copy.complete:
        raise NotCapturedError("unfinished")
    if copy.status != 200:
        raise NotCapturedError("status")
    request = _json(bytes(copy.request_body)) if copy.request_encoding in ("", "identity") else None
    if not isinstance(request, dict):
        raise NotCapturedError("unreadable")
    store = request.get("store")
    if not (settings.serving.capture_default if store is None else store is True):
        raise NotCapturedError("policy")
    if request.get("model") is not None and request["model"] not in served.names:
        raise NotCapturedError("model")
    try:
        answer = _answer(copy)
    except AnswerError:
        raise NotCapturedError("unreadable") from None
    prompts = _prompts(copy.chat, request)
    choices = [choice for choice in answer.choices if choice.plain]
    if not choices:
        raise NotCapturedError("form")
    several = max(int(request.get("n") or 1), 1)
    name = answer.id or f"tapped-{uuid.uuid4().hex}"
    temperature, top_k, top_p = (_number(request, field, default) for field, default in _SAMPLING.items())
    for choice in choices:
        if choice.index // several >= len(prompts):
            raise NotCapturedError("unreadable")
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
            ended=_ended(choice, request),
        )


def _json(data: bytes) -> Any:
    try:
        check_nesting(data)
        return msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return None
    except NestingError:
        raise NotCapturedError("unreadable") from None


def _number(request: dict[str, Any], field: str, default: float) -> float:
    value = request.get(field)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _answer(copy: Copy) -> UpstreamAnswer:
    data = bytes(copy.answer_body)
    encoding = copy.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        data = _unpacked(data, encoding, copy.limit)
    return read_events(data) if copy.headers.get("content-type", "").startswith(_EVENTS) else read_answer(data)


def _unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """Return the unpacked body of an answer.

    Raises:
        AnswerError: the encoding is not supported or does not match the data.
        NotCapturedError: the unpacked body has more than ``limit`` bytes; a kilobyte may unpack to a megabyte.
    """
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise AnswerError("its content-encoding is not supported")
    unpacker = zlib.decompressobj(_ANY_HEADER)
    try:
        unpacked = unpacker.decompress(data, limit + 1)
    except zlib.error:
        raise AnswerError("the body does not match its content-encoding") from None
    if len(unpacked) > limit:
        raise NotCapturedError("size")
    if not unpacker.eof:
        raise AnswerError("the body is incomplete")
    return unpacked


def _ended(choice: UpstreamChoice, request: dict[str, Any]) -> bool:
    """Return whether the model itself ended the answer, not a stop string; only vLLM reports the stop string."""
    is_known = choice.reports_stop or not (request.get("stop") or request.get("stop_token_ids"))
    return choice.finish_reason in ("stop", "tool_calls") and choice.stopped_at is None and is_known


def _prompts(chat: bool, request: dict[str, Any]) -> list[bytes]:
    """Return the prompts as JSON: a single chat, or one or more texts."""
    if any(request.get(name) for name in _OTHER_PROMPTS) or request.get("add_generation_prompt") is False:
        raise NotCapturedError("form")
    if chat:
        return [msgspec.json.encode(_chat(request))]
    prompt = request.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise NotCapturedError("form")
    return [msgspec.json.encode(text) for text in prompt]


def _chat(request: dict[str, Any]) -> Chat:
    messages, tools, options = request.get("messages"), request.get("tools"), request.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages or request.get("reasoning_effort") not in (None, "none"):
        raise NotCapturedError("form")
    if tools and request.get("tool_choice") == "none":  # some servers put these tools into the prompt
        raise NotCapturedError("form")
    return Chat([_turn(message) for message in messages], tools or [], options or {})


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("reasoning_content") or message.get("reasoning"):
        raise NotCapturedError("form")
    content = message.get("content")
    if isinstance(content, list):
        # Templates and servers join several parts in different ways.
        if len(content) != 1 or not isinstance(content[0], dict) or not isinstance(content[0].get("text"), str):
            raise NotCapturedError("form")
        content = content[0]["text"]
    if not isinstance(content, str | None):
        raise NotCapturedError("form")
    role = message.get("role")
    turn = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content or ""}
    if message.get("tool_calls"):
        turn["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return turn | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _call(call: Any) -> dict[str, Any]:
    """Return a call in an earlier answer with its arguments as an object, as servers pass it to templates."""
    try:
        function = call["function"]
        arguments = _json(function["arguments"].encode())
        parsed = {"name": function["name"], "arguments": function["arguments"] if arguments is None else arguments}
        return {"id": call.get("id", ""), "type": "function", "function": parsed}
    except (AttributeError, KeyError, TypeError):
        raise NotCapturedError("form") from None
