"""Function calls: the formats in which models write them, and a streaming parser."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from osd.engine.thinking import overlap


@dataclass(frozen=True)
class ToolFormat:
    """Format of function calls: a JSON object with the ``name`` of a function and its arguments under ``key``.

    Attributes:
        begin: text before each call; "" if a call is the whole answer.
        end: text after each call.
        key: key of the arguments.
        marks: texts that a chat template contains if it requests this format.
    """

    begin: str
    end: str
    key: str
    marks: tuple[str, ...]

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Pattern of the text before the arguments of a call; group 1 is the name as JSON."""
        return re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{self.key}"\s*:\s*(?=\{{)')

    def grammar(self, functions: dict[str, dict[str, Any]], several: bool, free: bool) -> str:
        """Return a grammar, in Lark's syntax, of an answer with function calls.

        Args:
            functions: JSON Schemas of the arguments, by the name of the function.
            several: whether the answer may contain more than one call.
            free: whether the answer may be text and may contain text around its calls.
        """
        rules = [f"body: {' | '.join(f'f{number}' for number in range(len(functions)))}"]
        for number, (name, schema) in enumerate(functions.items()):
            head = json.dumps(f'{{"name": {json.dumps(name)}, "{self.key}": ')
            rules.append(f'f{number}: {head} a{number} "}}"')
            rules.append(f"a{number}: %json {json.dumps(schema | _ON_ONE_LINE)}")
        begin, end = json.dumps(self.begin), json.dumps(f"\n{self.end}")
        if not self.begin:
            rules.append("start: body | OTHER\nOTHER: /([^{](.|\\n)*)?/" if free else "start: body")
        elif not free:
            more = ' ("\\n" call)*' if several else ""
            rules.append(f'start: call{more}\ncall: {begin} "\\n" body {end}')
        else:
            rules.append(f"start: call{'*' if several else '?'} END\nTEXT: /(.|\\n)*/")
            rules.append(f"END: TEXT & ~/(.|\\n)*{re.escape(self.begin)}(.|\\n)*/")
            rules.append(f'head[lazy]: TEXT {begin}\ncall: head "\\n" body {end}')
        return "\n".join(rules)


_ON_ONE_LINE = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}

TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", ("<tool_call>", '"arguments"')),
    "llama3": ToolFormat("", "", "parameters", ('{"name": function name, "parameters"',)),
}
"""Supported formats: Hermes, also used by Qwen 2.5 and Qwen 3, and the JSON format of Llama 3.1 and later."""


class NoToolsError(ValueError):
    """Error of a chat template that does not support tools; the message gives the reason in one sentence."""


def tool_format(template: str) -> ToolFormat:
    """Return the format of calls that a chat template requests.

    Raises:
        NoToolsError: the template has no tools or requests an unsupported format.
    """
    if not re.search(r"\btools\b", template):
        raise NoToolsError("The model's chat template does not support tools.")
    text = template.replace("\\", "")  # some templates escape quotes
    for form in TOOL_FORMATS.values():
        if all(mark in text for mark in form.marks):
            return form
    raise NoToolsError("The model's chat template uses a format of tool calls that is not supported.")


_MOST_HEAD = 1024
"""Limit on the characters of a call before its arguments; a longer head is text."""


@dataclass
class ParsedCall:
    """Function call in an answer: its ``name``, and the ``arguments`` so far, a JSON text."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def complete(self) -> dict[str, Any]:
        """Return the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AnswerPart:
    """Parsed part of an answer: ``text``, parts of calls in the format of OpenAI's deltas, and ``thinking``."""

    text: str
    calls: list[dict[str, Any]]
    thinking: str = ""

    def joined(self, last: AnswerPart) -> AnswerPart:
        """Return this part followed by ``last``, which must not start a call."""
        return AnswerPart(self.text + last.text, self.calls + last.calls, self.thinking + last.thinking)


class CallReader:
    """Streaming parser that separates the function calls of an answer from its text.

    A call of an unknown function, or a call without a valid head, is text. If the answer has calls, its text is
    stripped of surrounding white space.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """Parse calls in the format ``form`` of the functions ``names``."""
        self._form, self._names = form, names
        self.calls: list[ParsedCall] = []
        self._buffer = ""  # text that is not parsed yet
        self._scan: _ArgumentScanner | None = None  # scanner of the current call
        self._ended = False  # the arguments have ended and the end mark is missing
        self._is_plain = False  # format without marks: the answer is text
        self._space = ""  # white space that is held back
        self._has_text = False

    def feed(self, text: str) -> AnswerPart:
        """Parse the next piece of the answer."""
        return self._read(text, last=False)

    def close(self) -> AnswerPart:
        """Parse the rest of the answer after its end."""
        return self._read("", last=True)

    def _read(self, text: str, last: bool) -> AnswerPart:
        self._buffer += text
        texts: list[str] = []
        parts: dict[int, dict[str, Any]] = {}
        more = True
        while self._buffer and more:
            inside = self._scan is not None or self._ended
            more = self._read_arguments(parts) if inside else self._read_text(texts, parts, last)
        if last and not self.calls:
            texts.append(self._space)
        return AnswerPart("".join(texts), list(parts.values()))

    def _read_arguments(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Parse arguments or the end of a call; return whether parsing can continue."""
        if self._scan is not None:
            count = self._scan.read(self._buffer)
            piece, self._buffer = self._buffer[:count], self._buffer[count:]
            number = len(self.calls) - 1
            self.calls[-1].arguments += piece
            part = parts.setdefault(number, {"index": number, "function": {"arguments": ""}})
            part["function"]["arguments"] += piece
            if self._scan.ended:
                self._scan, self._ended = None, True
            return True
        mark = self._form.end or "}"
        end = self._buffer.find(mark)
        if end >= 0:
            self._buffer, self._ended = self._buffer[end + len(mark) :], False
            self._is_plain = not self._form.begin
        return end >= 0

    def _read_text(self, texts: list[str], parts: dict[int, dict[str, Any]], last: bool) -> bool:
        """Parse text up to the next call and the head of that call; return whether parsing can continue."""
        begin = self._form.begin
        if begin and not self._buffer.startswith(begin):
            at = self._buffer.find(begin)
            length = at if at >= 0 else len(self._buffer) - (0 if last else overlap(self._buffer, begin))
            self._emit(self._buffer[:length], texts)
            self._buffer = self._buffer[length:]
            return at >= 0
        head = None if self._is_plain else self._form.head.match(self._buffer, len(begin))
        if head is not None and (name := _decode_name(head[1])) in self._names:
            self._buffer = self._buffer[head.end() :]
            self.calls.append(ParsedCall(name))
            self._scan = _ArgumentScanner()
            number = len(self.calls) - 1
            parts[number] = {"index": number, **self.calls[-1].complete()}
            return True
        if head is None and not last and not self._is_plain and self._may_be_head(self._buffer[len(begin) :]):
            return False
        length = len(begin) or len(self._buffer)
        self._is_plain = not begin
        self._emit(self._buffer[:length], texts)
        self._buffer = self._buffer[length:]
        return True

    @staticmethod
    def _may_be_head(text: str) -> bool:
        return len(text) < _MOST_HEAD and text.lstrip()[:1] in ("", "{")

    def _emit(self, text: str, texts: list[str]) -> None:
        """Append ``text`` to ``texts``; trailing white space is held back until more text follows."""
        body = text.rstrip()
        if body:
            texts.append((self._space + body).lstrip() if self.calls and not self._has_text else self._space + body)
            self._space, self._has_text = "", True
        self._space += text[len(body) :]


class _ArgumentScanner:
    """Scanner that finds the end of a JSON object in pieces of text."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.ended = False

    def read(self, text: str) -> int:
        """Return the number of characters of ``text`` that belong to the object."""
        for place, letter in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if not self._depth:
                    self.ended = True
                    return place
        return len(text)


def _decode_name(name: str) -> str:
    """Return the text of a JSON string; "" if it is invalid."""
    try:
        return json.loads(name)
    except ValueError:
        return ""
