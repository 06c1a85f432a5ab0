"""Thinking of a model before its answer: the marks around it, and a streaming parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["thinking", "answer"]
"""Phase of a sequence; thinking lasts from the end of its first mark to the end of its second mark."""


@dataclass(frozen=True)
class ThinkingMarks:
    """Texts before and after the thinking of a model; each is the text of some tokens, or a special token."""

    begin: str
    end: str


@dataclass(frozen=True)
class Thinking:
    """Marks around the thinking in an answer; ``begun`` if the prompt ends with the first mark."""

    marks: ThinkingMarks
    begun: bool = False


class ThinkingReader:
    """Streaming parser that separates the thinking of a model from its answer.

    Attributes:
        is_inside: whether the text so far ends inside the thinking.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._marks, self._buffer = thinking.marks, ""
        self.is_inside, self._is_over = thinking.begun, False

    def feed(self, text: str) -> tuple[str, str]:
        """Parse the next piece; return the thinking and the answer in it."""
        self._buffer += text
        if not (self.is_inside or self._is_over):
            start = self._buffer.lstrip()
            if len(start) < len(self._marks.begin) and self._marks.begin.startswith(start):
                return "", ""
            self.is_inside = start.startswith(self._marks.begin)
            self._is_over = not self.is_inside
            if self.is_inside:
                self._buffer = start.removeprefix(self._marks.begin)
        if self._is_over:
            return "", self._take(len(self._buffer))
        at = self._buffer.find(self._marks.end)
        if at < 0:
            return self._take(len(self._buffer) - overlap(self._buffer, self._marks.end)), ""
        thinking = self._take(at)
        self.is_inside, self._is_over = False, True
        return thinking, self._take(len(self._buffer)).removeprefix(self._marks.end)

    def close(self) -> tuple[str, str]:
        """Return the rest of the thinking and of the answer after the end."""
        rest = self._take(len(self._buffer))
        return (rest, "") if self.is_inside else ("", rest)

    def _take(self, count: int) -> str:
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        return piece


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``mark``; 0 for none."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
