"""Calls of functions: how models write them down, and how they are read from an answer as it comes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ToolFormat:
    """A call is a JSON object with the ``name`` of a function and its arguments under ``key``.

    ``begin`` and ``end`` stand around each call; without them a call is a whole answer. ``marks`` are what a chat
    template holds that asks for this format.
    """

    begin: str
    end: str
    key: str
    marks: tuple[str, ...]

    @cached_property
    def head(self) -> re.Pattern[str]:
        """What comes before the arguments of a call, with the name as JSON."""
        return re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{self.key}"\s*:\s*(?=\{{)')

    def grammar(self, functions: dict[str, dict[str, Any]], several: bool, free: bool) -> str:
        """A grammar in Lark's syntax of an answer that calls one of these functions, or ``several``.

        ``functions`` are the JSON Schemas of their arguments by their names. With ``free`` the answer may be text, and
        have text around its calls.
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
"""Hermes's, which Qwen 2.5 and Qwen 3 use too, and the JSON of Llama 3.1 and later."""


class NoToolsError(ValueError):
    """The model's chat template cannot have tools; the message is one sentence that says why."""


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template asks for.

    Raises:
        NoToolsError: it knows no tools, or has them called in another way.
    """
    if not re.search(r"\btools\b", template):
        raise NoToolsError("The model's chat template knows no tools.")
    text = template.replace("\\", "")  # which stands before quotes, in some
    found = next((one for one in TOOL_FORMATS.values() if all(mark in text for mark in one.marks)), None)
    if found is None:
        raise NoToolsError("The model's chat template has tools called in a way that is not supported.")
    return found


_MOST_HEAD = 1024
"""Characters of a call before its arguments at most; what has more is text."""


@dataclass
class Call:
    """A call of a function: its ``name``, and what is known of its ``arguments``, a JSON text."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def whole(self) -> dict[str, Any]:
        """As an answer has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class News:
    """What a part of an answer says: some ``text``, and parts of calls as OpenAI's deltas have them."""

    text: str
    calls: list[dict[str, Any]]

    def and_then(self, last: News) -> News:
        """With what the end of the answer says, which begins no call."""
        return News(self.text + last.text, self.calls + last.calls)


class CallReader:
    """Tells calls and text apart in one answer; pieces of text come in, what they mean goes out.

    What is no call of a function that there is, whole or as far as its arguments, is text. With calls, the text has no
    white space around it.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self.calls: list[Call] = []
        self._left = ""  # text that is not told apart yet
        self._scan: _Arguments | None = None  # of the call whose arguments come
        self._ended = False  # a call did, and its end mark has not come
        self._plain = False  # without marks: the answer is text
        self._space = ""  # white space that stands before text or before a call
        self._said = False  # some text

    def feed(self, text: str) -> News:
        """What the next piece of the answer says."""
        return self._read(text, last=False)

    def close(self) -> News:
        """What is left of the answer says, now that it has ended."""
        return self._read("", last=True)

    def _read(self, text: str, last: bool) -> News:
        self._left += text
        said: list[str] = []
        parts: dict[int, dict[str, Any]] = {}
        more = True
        while self._left and more:
            inside = self._scan is not None or self._ended
            more = self._arguments(parts) if inside else self._outside(said, parts, last)
        if last and not self.calls:
            said.append(self._space)
        return News("".join(said), list(parts.values()))

    def _arguments(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Read on in a call; returns whether there may be more to read."""
        if self._scan is not None:
            count = self._scan.read(self._left)
            piece, self._left = self._left[:count], self._left[count:]
            number = len(self.calls) - 1
            self.calls[-1].arguments += piece
            part = parts.setdefault(number, {"index": number, "function": {"arguments": ""}})
            part["function"]["arguments"] += piece
            if self._scan.ended:
                self._scan, self._ended = None, True
            return True
        mark = self._form.end or "}"
        end = self._left.find(mark)
        if end >= 0:
            self._left, self._ended = self._left[end + len(mark) :], False
            self._plain = not self._form.begin
        return end >= 0

    def _outside(self, said: list[str], parts: dict[int, dict[str, Any]], last: bool) -> bool:
        """Read text up to the next call, and its head; returns whether there may be more to read."""
        begin = self._form.begin
        if begin and not self._left.startswith(begin):
            at = self._left.find(begin)
            sure = at if at >= 0 else len(self._left) - (0 if last else _overlap(self._left, begin))
            self._say(self._left[:sure], said)
            self._left = self._left[sure:]
            return at >= 0
        head = None if self._plain else self._form.head.match(self._left, len(begin))
        if head is not None and (name := _text(head[1])) in self._names:
            self._left = self._left[head.end() :]
            self.calls.append(Call(name))
            self._scan = _Arguments()
            number = len(self.calls) - 1
            parts[number] = {"index": number, **self.calls[-1].whole()}
            return True
        if head is None and not last and not self._plain and self._may_be_head(self._left[len(begin) :]):
            return False
        sure = len(begin) or len(self._left)
        self._plain = not begin
        self._say(self._left[:sure], said)
        self._left = self._left[sure:]
        return True

    @staticmethod
    def _may_be_head(text: str) -> bool:
        return len(text) < _MOST_HEAD and text.lstrip()[:1] in ("", "{")

    def _say(self, text: str, said: list[str]) -> None:
        """Say a text; white space waits for what comes after it, and is nothing where all else is calls."""
        body = text.rstrip()
        if body:
            said.append((self._space + body).lstrip() if self.calls and not self._said else self._space + body)
            self._space, self._said = "", True
        self._space += text[len(body) :]


class _Arguments:
    """Finds the end of a JSON object in pieces of text."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.ended = False

    def read(self, text: str) -> int:
        """How many characters of the text belong to the object."""
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


def _text(written: str) -> str:
    """What a JSON text says, "" where it is none."""
    try:
        return json.loads(written)
    except ValueError:
        return ""


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
