"""Thinking of a model before its answer: the marks around it, and a streaming parser."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from serving.api.tool_calls import overlap


@dataclass(frozen=True)
class ThinkingMarks:
    """Texts before and after the thinking of a model."""

    begin: str
    end: str


THINKING_MARKS = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("<seed:think>", "</seed:think>"))
"""Marks of DeepSeek, Qwen, SmolLM and most other models, and of Seed-OSS."""


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks in a chat template; None if its model does not think."""
    return next((marks for marks in THINKING_MARKS if marks.end in template or marks.begin in template), None)


def unknown_variable(template: str, names: Collection[str]) -> str | None:
    """Return the first of ``names`` that a chat template does not use; None if it uses all of them."""
    return next((name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)), None)


class ThinkingReader:
    """Streaming parser that separates the thinking of a model from its answer."""

    def __init__(self, marks: ThinkingMarks, begun: bool) -> None:
        """Parse thinking between ``marks``; ``begun`` if the prompt ends with the first mark."""
        self._marks, self._buffer = marks, ""
        self._is_inside, self._is_over = begun, False

    def feed(self, text: str) -> tuple[str, str]:
        """Parse the next piece; return the thinking and the answer in it."""
        self._buffer += text
        if not (self._is_inside or self._is_over):
            start = self._buffer.lstrip()
            if len(start) < len(self._marks.begin) and self._marks.begin.startswith(start):
                return "", ""
            self._is_inside = start.startswith(self._marks.begin)
            self._is_over = not self._is_inside
            if self._is_inside:
                self._buffer = start.removeprefix(self._marks.begin)
        if self._is_over:
            return "", self._take(len(self._buffer))
        at = self._buffer.find(self._marks.end)
        if at < 0:
            return self._take(len(self._buffer) - overlap(self._buffer, self._marks.end)), ""
        thinking = self._take(at)
        self._is_inside, self._is_over = False, True
        return thinking, self._take(len(self._buffer)).removeprefix(self._marks.end)

    def close(self) -> tuple[str, str]:
        """Return the rest of the thinking and of the answer after the end."""
        rest = self._take(len(self._buffer))
        return (rest, "") if self._is_inside else ("", rest)

    def _take(self, count: int) -> str:
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        return piece
