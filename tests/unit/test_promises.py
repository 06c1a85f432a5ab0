"""The page of promises names the faults that are tested, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def caused() -> set[tuple[str, str]]:
    """What each test marked as a fault does, and what is promised of it."""
    marks = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                what, promise = (ast.literal_eval(argument) for argument in node.args)
                marks.add((what, promise))
    return marks


def written() -> set[tuple[str, str]]:
    rows = (ROOT / "docs" / "promises.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]
    return {(what, promise) for what, promise, *_ in cells[1:]}


def test_the_page_names_every_fault_that_is_tested_and_no_other():
    assert written() == caused()
