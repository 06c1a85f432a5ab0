"""Prompts about code: made from the functions of this Python's own standard library.

The sources are parsed and never imported, so that no module runs.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from osd.traffic.prompt import Prompt, draw, shuffled

_PACKAGES = (
    *("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "zoneinfo"),
)
_MIN_LINES, _MAX_CHARACTERS = 3, 300
_QUESTIONS = ("Explain what this Python function does:", "Write a docstring for this Python function:")
_TESTS = ("Write unit tests with unittest for this Python function:",)


def prompts() -> list[Prompt]:
    """One question about each public function or method that is neither trivial nor long."""
    return shuffled(_questions("stdlib", _QUESTIONS))


def unit_tests() -> list[Prompt]:
    """For each of the same functions the wish for unit tests: a narrow domain, as a service has that does one thing."""
    return shuffled(_questions("unittest", _TESTS))


def _questions(domain: str, questions: tuple[str, ...]) -> Iterator[Prompt]:
    for name, code in _library():
        prompt = Prompt(f"{domain}-{name}", domain, (code,))
        question = questions[int(draw(prompt, "question") * len(questions))]
        yield Prompt(prompt.id, prompt.domain, (f"{question}\n\n```python\n{code}\n```",))


@cache
def _library() -> tuple[tuple[str, str], ...]:
    """Name and source of every function that is asked about; parsing the library takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.glob("*.py") if not path.name.startswith("_")]
    for package in _PACKAGES:
        files += (root / package).rglob("*.py")
    found = []
    for file in sorted(files):
        if "test" not in file.relative_to(root).parts[:-1]:
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            found += ((f"{module}.{name}", code) for name, code in _functions(file))
    return tuple(found)


def _functions(file: Path) -> Iterator[tuple[str, str]]:
    """Name with line, and source, of the public functions of a module and of its classes."""
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
