"""The faults on the page of promises, compared with the faults that tests cause."""

from __future__ import annotations

import ast
import datetime
from pathlib import Path

from tests.fault_table import HEAD

ROOT = Path(__file__).parents[2]


def faults_of_tests() -> set[tuple[str, ...]]:
    """Return the fault, the promise and the process of every test that is marked as a fault."""
    marks = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                facts = (*node.args, *(keyword.value for keyword in node.keywords))
                marks.add(tuple(ast.literal_eval(fact) for fact in facts))
    return marks


def rows_of_page() -> list[list[str]]:
    """Return the cells of every row of the page, the head first."""
    rows = (ROOT / "docs" / "promises.md").read_text().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]


def test_promises_page_names_exactly_the_tested_faults():
    _, *rows = rows_of_page()
    assert {tuple(cells[:3]) for cells in rows} == faults_of_tests()


def test_promises_page_states_the_date_of_every_row():
    head, *rows = rows_of_page()
    assert tuple(head) == HEAD
    for fault, *_, date in rows:
        assert datetime.date.fromisoformat(date), fault
