"""How models write down the functions that they call: by format, which is told from the text of a chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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
