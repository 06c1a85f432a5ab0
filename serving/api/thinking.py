"""Thinking of a model in its chat template: the marks around it, and the variables that control it."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from osd.engine.thinking import ThinkingMarks

THINKING_MARKS = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("<seed:think>", "</seed:think>"))
"""Marks of DeepSeek, Qwen, SmolLM and most other models, and of Seed-OSS."""


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks in a chat template; None if its model does not think."""
    return next((marks for marks in THINKING_MARKS if marks.end in template or marks.begin in template), None)


def unknown_variable(template: str, names: Collection[str]) -> str | None:
    """Return the first of ``names`` that a chat template does not use; None if it uses all of them."""
    words = _words(template)
    return next((name for name in names if name not in words), None)


@lru_cache(4)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))
