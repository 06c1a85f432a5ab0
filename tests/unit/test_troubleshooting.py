"""Error messages on the page of troubleshooting, compared with the messages in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("osd", "serving", "trainer", "deploy")
FEWEST_ENTRIES = 20


def quoted_messages() -> list[tuple[str, ...]]:
    """Return the quoted parts of the message in each row of the page."""
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    cells = [row.split(" | ")[0] for row in rows]
    return [tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells if cell != "| message"]


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module without its docstrings; a line break replaces each value in an f-string."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in tree.values)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from texts_of(child)


@cache
def texts_of_code() -> frozenset[str]:
    """Return all strings of the product."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return frozenset(text for file in files for text in texts_of(ast.parse(file.read_text())))


def test_troubleshooting_page_quotes_each_message_once():
    messages = quoted_messages()
    assert len(messages) == len(set(messages)) >= FEWEST_ENTRIES
    assert () not in messages


@pytest.mark.parametrize("parts", quoted_messages(), ids=lambda parts: parts[0][:40])
def test_quoted_message_occurs_in_the_code(parts: tuple[str, ...]):
    assert any(all(part in text for part in parts) for text in texts_of_code())
