"""Answers of OpenAI's API as whole JSON or as a stream of events, read for what the model said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

_DONE = b"[DONE]"
_THOUGHTS = ("reasoning_content", "reasoning", "refusal", "audio", "function_call")
_ENDS = ("stop", "length", "tool_calls")


class AnswerError(ValueError):
    """It is no answer of OpenAI's API, or not a whole one."""


@dataclass
class Choice:
    """One choice as far as it was read, its text in ``parts``.

    ``calls`` have the fields of ``osd.capture.exchange.FunctionCall``. It is ``other`` where it holds more than text
    and calls. Where its server ``tells_stop``, ``stopped_at`` is the string or token that ended it, None for the
    model's own end.
    """

    index: int
    parts: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    finished: str | None = None
    other: bool = False
    tells_stop: bool = False
    stopped_at: Any = None

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(self.parts)

    @property
    def plain(self) -> bool:
        """Whether it is whole, and nothing but text and calls of functions."""
        return self.finished in _ENDS and not self.other and bool(any(self.parts) or self.calls)


@dataclass(frozen=True)
class Answer:
    """An answer's ``id``, "" for none, and its choices."""

    id: str
    choices: list[Choice]


def read_answer(data: bytes) -> Answer:
    """Read an answer that is one JSON object.

    Raises:
        AnswerError: it is none.
    """
    reader = _Reader()
    reader.add(data, "message")
    return reader.answer()


def read_events(data: bytes) -> Answer:
    """Read the server-sent events of an answer.

    Raises:
        AnswerError: they are none, or end early.
    """
    reader, done = _Reader(), False
    for event in _events(data):
        if event == _DONE:
            done = True
        else:
            reader.add(event, "delta")
    if not done:
        raise AnswerError("its end is missing")
    return reader.answer()


def _events(data: bytes) -> Iterator[bytes]:
    """The data of each event."""
    lines: list[bytes] = []
    for line in (*data.splitlines(), b""):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines = []


class _Reader:
    def __init__(self) -> None:
        self._id, self._choices = "", dict[int, Choice]()

    def add(self, data: bytes, key: str) -> None:
        """Take in an object whose choices have a message, or a part of one, under ``key``."""
        try:
            found = msgspec.json.decode(data)
            if found.get("error") is not None:
                raise AnswerError("it is an error")
            self._id = found.get("id") or self._id
            for given in found.get("choices") or ():
                index = int(given.get("index") or 0)
                self._take(self._choices.setdefault(index, Choice(index)), given, given.get(key))
        except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise AnswerError(type(error).__name__) from None

    def answer(self) -> Answer:
        """All that was read."""
        return Answer(str(self._id), [self._choices[index] for index in sorted(self._choices)])

    def _take(self, choice: Choice, given: dict[str, Any], part: dict[str, Any] | None) -> None:
        said = given if part is None else part  # text completions have their text in the choice itself
        text = (said.get("text") if part is None else said.get("content")) or ""
        if not isinstance(text, str):
            raise AnswerError("its text is none")
        choice.parts.append(text)
        choice.other = choice.other or any(said.get(name) for name in _THOUGHTS)
        for position, call in enumerate(said.get("tool_calls") or ()):
            self._call(choice.calls, int(call.get("index", position)), call)
        choice.finished = given.get("finish_reason") or choice.finished
        if "stop_reason" in given:
            choice.tells_stop, choice.stopped_at = True, given["stop_reason"]

    def _call(self, calls: list[dict[str, str]], index: int, call: dict[str, Any]) -> None:
        if index > len(calls):
            raise AnswerError("a call is missing")
        if index == len(calls):
            calls.append({"id": "", "name": "", "arguments": ""})
        known, function = calls[index], call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""
