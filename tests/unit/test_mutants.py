"""The sample of mutants, the choice of tests and the verdict of `make mutants`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.reach import find_tests
from tests.mutants.sampling import Mutant, sample_mutants

ROOT = Path(__file__).parents[2]
LAW = "osd/ages/law.py"
CODE = '''"""A module."""
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import os

log = logging.getLogger(__name__)
__all__ = ["is_adult"][:1]
pairs = zip(__all__, __all__, strict=True)


@dataclass(frozen=True)
class Age:
    years: float


class Ages(Protocol):
    oldest: int = 3


def is_adult(years: int | None, *, border: int = 18) -> bool | None:
    """Compare: 1 < 2."""
    if years is None:
        raise ValueError(f"{1 + 1} values are missing")
    log.info("%d years", years + 1)
    return years >= border


def is_child(years: int) -> bool:
    """What no test calls."""
    return not is_adult(years)
'''
TEST = """from osd.ages.law import is_adult


def test_an_adult():
    assert is_adult(18) and is_adult(19)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Small project: one package with one test that calls one function."""
    for name, text in {
        "osd/__init__.py": "",
        "osd/ages/__init__.py": "",
        LAW: CODE,
        "tests/unit/test_ages.py": TEST,
        "tests/unit/test_other.py": "from osd.config import load\nfrom osd.files import write\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\npythonpath = ["."]\n',
        ".venv/bin/python": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutants_of(tree: Path, code: str, count: int = 100, seed: int = 0) -> list[Mutant]:
    (tree / LAW).write_text(code)
    return sample_mutants(tree, ["osd/ages"], count, seed)


def by_line(mutants: Iterable[tuple[int, Any]]) -> dict[str, Any]:
    """Return values by the text of their line."""
    return {CODE.splitlines()[line - 1].strip(): known for line, known in mutants}


def test_sample_has_no_fault_that_cannot_matter(tree: Path):
    lines = by_line((mutant.line, None) for mutant in mutants_of(tree, CODE))
    assert set(lines) == {"if years is None:", "return years >= border", "return not is_adult(years)"}


def test_sample_with_the_same_seed_is_the_same(tree: Path):
    samples = [mutants_of(tree, "numbers = [1, 2, 3, 4, 5, 6]\n", 2, seed) for seed in (0, 0, *range(1, 5))]
    assert samples[0] == samples[1]
    assert len({tuple(mutant.diff for mutant in sample) for sample in samples}) > 1


def test_sample_and_tests_of_a_path_are_its_own(tree: Path):
    (tree / "osd/ages/more.py").write_text("number = 1\n")
    assert {mutant.path for mutant in sample_mutants(tree, ["osd/ages/more.py"], 9, 0)} == {"osd/ages/more.py"}
    assert find_tests(tree, ["osd/ages"]) == ["tests/unit/test_ages.py"]


def test_call_whose_result_is_not_used_is_removed(tree: Path):
    (mutant,) = mutants_of(tree, "def add(ages, age):\n    ages.append(age)\n")
    assert mutant.code == "def add(ages, age):\n    pass\n"


def test_statement_of_a_fault_is_the_head_of_a_compound_one(tree: Path):
    mutants = mutants_of(tree, "def f(a, b):\n    if (a and\n        b):\n        return a\n")
    assert {mutant.statement for mutant in mutants if mutant.line == 2} == {range(2, 4)}


def run_mutants(tree: Path) -> tuple[dict[str, bool], float, str]:
    """Return whether a test noticed the fault of each line, the score, and the output."""
    command = [sys.executable, "-m", "tests.mutants", "osd/ages", "--sample", "100", "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    report = json.loads((tree / "mutants-osd-ages.json").read_text())
    noticed = by_line((mutant["line"], mutant["noticed"]) for mutant in report["mutants"])
    return noticed, report["score"], run.stdout


def test_report_tells_survivors_from_faults_that_a_test_notices(tree: Path):
    noticed, score, printed = run_mutants(tree)
    assert noticed == {"if years is None:": True, "return years >= border": True, "return not is_adult(years)": False}
    assert score == pytest.approx(3 / 4)
    assert "-    return not is_adult(years)" in printed
    assert (tree / LAW).read_text() == CODE, "faults are planted in copies only"


def test_fault_is_not_noticed_by_a_test_that_fails_once(tree: Path):
    (tree / "tests/unit/test_ages.py").write_text("""from pathlib import Path
from osd.ages.law import is_adult


def test_an_adult():
    is_adult(19)
    failed = Path("failed")
    if ">= border" not in Path("osd/ages/law.py").read_text() and not failed.exists():
        failed.touch()
        raise AssertionError
""")
    noticed, _, printed = run_mutants(tree)
    assert noticed["if years is None:"]
    assert not noticed["return years >= border"], printed
