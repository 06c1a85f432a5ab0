"""Prompts about prose: made from the language reference that Python carries for its ``help()``."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

from osd.traffic.prompt import Prompt, draw, shuffled

_MIN_CHARACTERS, _MAX_CHARACTERS = 200, 700
_QUESTIONS = (
    "Summarise this section of the Python reference on {topic!r}:",
    "Explain this section of the Python reference on {topic!r} to a beginner:",
)


def prompts() -> list[Prompt]:
    """One question about each section of each topic."""
    return shuffled(_questions())


def _questions() -> Iterator[Prompt]:
    for topic, text in sorted(topics.items()):
        for number, section in enumerate(_sections(text)):
            prompt = Prompt(f"pydoc-{topic}-{number}", "pydoc", (section,))
            question = _QUESTIONS[int(draw(prompt, "question") * len(_QUESTIONS))].format(topic=topic)
            yield Prompt(prompt.id, prompt.domain, (f"{question}\n\n{section}",))


def _sections(text: str) -> Iterator[str]:
    """Whole paragraphs, as many as fit; a paragraph that is too long alone is left out."""
    section = ""
    for paragraph in [*text.split("\n\n"), ""]:
        joined = f"{section}\n\n{paragraph}".strip("\n")
        if paragraph and len(joined) <= _MAX_CHARACTERS:
            section = joined
            continue
        if len(section) >= _MIN_CHARACTERS:
            yield section
        section = paragraph if len(paragraph) <= _MAX_CHARACTERS else ""
