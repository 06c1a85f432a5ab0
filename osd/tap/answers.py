"""Parser of answers in OpenAI's format, complete or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from osd.nesting import check_nesting

_DONE = b"[DONE]"
_THOUGHTS = ("reasoning_content", "reasoning", "refusal", "audio", "function_call")
_ENDS = ("stop", "length", "tool_calls")


class AnswerError(ValueError):
    """Error of data that is not a complete answer in OpenAI's format."""


@dataclass
class UpstreamChoice:
    """Choice of an answer.

    Attributes:
        index: number of the choice.
        parts: parts of the text.
        calls: function calls with the fields of ``osd.capture.exchange.FunctionCall``.
        finish_reason: finish reason; None if the choice is incomplete.
        has_other_content: whether the choice has content other than text and function calls.
        reports_stop: whether the server reports ``stopped_at``.
        stopped_at: stop string or stop token that ended the choice; None if the model ended it.
    """

    index: int
    parts: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    has_other_content: bool = False
    reports_stop: bool = False
    stopped_at: Any = None

    @property
    def text(self) -> str:
        """Text of the choice."""
        return "".join(self.parts)

    @property
    def plain(self) -> bool:
        """Whether the choice is complete and has only text and function calls."""
        return self.finish_reason in _ENDS and not self.has_other_content and bool(any(self.parts) or self.calls)


@dataclass(frozen=True)
class UpstreamAnswer:
    """Answer of an upstream server; ``id`` is "" without an id."""

    id: str
    choices: list[UpstreamChoice]


def read_answer(data: bytes) -> UpstreamAnswer:
    """Parse an answer that is a JSON object.

    Raises:
        AnswerError: the data is invalid or an error.
    """
    reader = _AnswerReader()
    reader.add(data, "message")
    return reader.answer()


def read_events(data: bytes) -> UpstreamAnswer:
    """Parse the server-sent events of an answer.

    Raises:
        AnswerError: an event is invalid or an error, or the last event is missing.
    """
    reader, done = _AnswerReader(), False
    for event in _events(data):
        if event == _DONE:
            done = True
        else:
            reader.add(event, "delta")
    if not done:
        raise AnswerError("the last event is missing")
    return reader.answer()


def _events(data: bytes) -> Iterator[bytes]:
    """Yield the data of each event."""
    lines: list[bytes] = []
    for line in (*data.splitlines(), b""):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines = []


class _AnswerReader:
    def __init__(self) -> None:
        self._id, self._choices = "", dict[int, UpstreamChoice]()

    def add(self, data: bytes, key: str) -> None:
        """Add a JSON object: a complete answer, or an event with a part of the answer.

        Args:
            data: the JSON object.
            key: field of each choice that holds the message or the part of it.

        Raises:
            AnswerError: the data is invalid or an error.
        """
        try:
            check_nesting(data)
            content = msgspec.json.decode(data)
            if content.get("error") is not None:
                raise AnswerError("it is an error")
            self._id = content.get("id") or self._id
            for fields in content.get("choices") or ():
                index = int(fields.get("index") or 0)
                self._add_part(self._choices.setdefault(index, UpstreamChoice(index)), fields, fields.get(key))
        except AnswerError:
            raise
        except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise AnswerError(type(error).__name__) from None

    def answer(self) -> UpstreamAnswer:
        """Return the answer so far."""
        return UpstreamAnswer(str(self._id), [self._choices[index] for index in sorted(self._choices)])

    def _add_part(self, choice: UpstreamChoice, fields: dict[str, Any], message: dict[str, Any] | None) -> None:
        part = fields if message is None else message  # a text completion has its text in the choice itself
        text = (part.get("text") if message is None else part.get("content")) or ""
        if not isinstance(text, str):
            raise AnswerError("the text is not a string")
        choice.parts.append(text)
        choice.has_other_content = choice.has_other_content or any(part.get(name) for name in _THOUGHTS)
        for position, call in enumerate(part.get("tool_calls") or ()):
            self._add_call(choice.calls, int(call.get("index", position)), call)
        choice.finish_reason = fields.get("finish_reason") or choice.finish_reason
        if "stop_reason" in fields:
            choice.reports_stop, choice.stopped_at = True, fields["stop_reason"]

    def _add_call(self, calls: list[dict[str, str]], index: int, call: dict[str, Any]) -> None:
        if index > len(calls):
            raise AnswerError("a call is missing")
        begun = calls[index]["id"] if index < len(calls) else ""
        if begun and call.get("id") not in (None, "", begun):
            raise AnswerError("two calls have the same index")
        if index == len(calls):
            calls.append({"id": "", "name": "", "arguments": ""})
        known, function = calls[index], call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""
