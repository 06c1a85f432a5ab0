"""Prompts about code and prose, from the standard library and the language reference of this Python.

The sources are parsed and never imported, so no module runs.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from osd.traffic.prompt import Prompt, draw, shuffled

_PACKAGES = (
    *("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "zoneinfo"),
)
_MIN_LINES, _MAX_CHARACTERS = 3, 300
_QUESTIONS = ("Explain what this Python function does:", "Write a docstring for this Python function:")
_TESTS = ("Write unit tests with unittest for this Python function:",)
_SHORTEST, _LONGEST = 200, 700  # characters of a section of the reference
_PROSE_QUESTIONS = (
    "Summarise this section of the Python reference on {topic!r}:",
    "Explain this section of the Python reference on {topic!r} to a beginner:",
)


def prompts() -> list[Prompt]:
    """Return a question about each public function or method that is neither trivial nor long."""
    return shuffled(_questions("stdlib", _QUESTIONS))


def unit_tests() -> list[Prompt]:
    """Return a request for unit tests of each of these functions, as an example of a narrow domain."""
    return shuffled(_questions("unittest", _TESTS))


def _questions(domain: str, questions: tuple[str, ...]) -> Iterator[Prompt]:
    for name, code in _library():
        prompt = Prompt(f"{domain}-{name}", domain, (code,))
        question = questions[int(draw(prompt, "question") * len(questions))]
        yield Prompt(prompt.id, prompt.domain, (f"{question}\n\n```python\n{code}\n```",))


@cache
def _library() -> tuple[tuple[str, str], ...]:
    """Return name and source of every function to ask about; parsing the library takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.glob("*.py") if not path.name.startswith("_")]
    for package in _PACKAGES:
        files += (root / package).rglob("*.py")
    functions = []
    for file in sorted(files):
        if "test" not in file.relative_to(root).parts[:-1]:
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            functions += ((f"{module}.{name}", code) for name, code in _functions(file))
    return tuple(functions)


def _functions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name with line, and source, of the public functions of a module and of its classes."""
    text = file.read_text(encoding="utf-8", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = ast.parse(text)
    lines = text.splitlines()
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for prefix, body in [("", module.body), *((f"{node.name}.", node.body) for node in classes)]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if code.count("\n") + 1 >= _MIN_LINES and len(code) <= _MAX_CHARACTERS:
                yield f"{prefix}{node.name}:{node.lineno}", code


def prose() -> list[Prompt]:
    """Return a question about each section of the language reference that Python contains for ``help()``."""
    return shuffled(_about_prose())


def _about_prose() -> Iterator[Prompt]:
    for topic, text in sorted(topics.items()):
        for number, section in enumerate(_sections(text)):
            prompt = Prompt(f"pydoc-{topic}-{number}", "pydoc", (section,))
            question = _PROSE_QUESTIONS[int(draw(prompt, "question") * len(_PROSE_QUESTIONS))].format(topic=topic)
            yield Prompt(prompt.id, prompt.domain, (f"{question}\n\n{section}",))


def _sections(text: str) -> Iterator[str]:
    """Yield groups of whole paragraphs of limited length; a paragraph that is too long is omitted."""
    section = ""
    for paragraph in [*text.split("\n\n"), ""]:
        joined = f"{section}\n\n{paragraph}".strip("\n")
        if paragraph and len(joined) <= _LONGEST:
            section = joined
            continue
        if len(section) >= _SHORTEST:
            yield section
        section = paragraph if len(paragraph) <= _LONGEST else ""
