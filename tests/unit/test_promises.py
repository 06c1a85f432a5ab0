"""The faults on the page of promises, compared with the faults that tests cause."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def faults_of_tests() -> set[tuple[str, str]]:
    """Return the fault and the promise of every test that is marked as a fault."""
    marks = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                fault, promise = (ast.literal_eval(argument) for argument in node.args)
                marks.add((fault, promise))
    return marks


def faults_on_page() -> set[tuple[str, str]]:
    """Return the fault and the promise of every row of the page."""
    rows = (ROOT / "docs" / "promises.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]
    return {(fault, promise) for fault, promise, *_ in cells[1:]}


def test_promises_page_names_exactly_the_tested_faults():
    assert faults_on_page() == faults_of_tests()
