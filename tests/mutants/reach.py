"""Selection of tests: tests of a package, and tests that reach a line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

from tests.mutants.runs import Run, import_libraries
from tests.mutants.sampling import Mutant

ROOMS = ("tests/unit", "tests/integration")
IMPORTS = re.compile(r"^(?:from|import) ((?:osd|serving|trainer|deploy|benchmarks)\b[\w.]*)", re.MULTILINE)
LONGEST_RUN = 3000  # seconds


def find_tests(root: Path, paths: Iterable[str]) -> list[str]:
    """Return the files of the unit and integration tests of some paths.

    A test file belongs to a path if its name or its folder begins with the name of the path, or if at least half of
    the modules of this project that it imports are below the path.
    """
    names = [path.removesuffix(".py").rstrip("/") for path in paths]
    folders = tuple(f"tests/unit/{name.removeprefix('osd/')}/" for name in names)
    files = tuple(f"test_{name.rpartition('/')[2]}" for name in names)
    modules = tuple(f"{name.replace('/', '.')}." for name in names)
    tests: list[str] = []
    for file in sorted(file for room in ROOMS for file in (root / room).rglob("test_*.py")):
        test = str(file.relative_to(root))
        imported = IMPORTS.findall(file.read_text())
        tested = [module for module in imported if f"{module}.".startswith(modules)]
        if test.startswith(folders) or file.name.startswith(files) or (tested and 2 * len(tested) >= len(imported)):
            tests.append(test)
    return tests


class Reach:
    """Lines that each test reaches, and its duration, recorded in one run without mutants.

    Args:
        tree: A copy of the tree.
        files: The test files to run.
        paths: The packages whose lines are recorded.

    Attributes:
        failed: The tests that fail without a mutant.
        seconds: The duration of each test that passes.
    """

    def __init__(self, tree: Path, files: list[str], paths: Iterable[str]) -> None:
        options = ["--cov-context=test", "--cov-report=", *(f"--cov={path}" for path in paths)]
        run = Run(tree, [*options, *files], LONGEST_RUN)
        while not run.is_over():
            time.sleep(0.1)
        notes = run.notes()
        if not notes["seconds"]:
            raise RuntimeError(f"no test ran: {run.log.read_text()[-2000:]}")
        import_libraries(notes["libraries"])
        self.failed: list[str] = notes["failed"]
        self.seconds = {test: took for test, took in notes["seconds"].items() if test not in self.failed}
        self._tree = tree
        self._data = CoverageData(str(tree / ".coverage"))
        self._data.read()

    def find_tests(self, mutant: Mutant, limit: float) -> tuple[list[str], int]:
        """Return the tests that reach a mutant, shortest first, and the number of those left out.

        Args:
            mutant: The mutant.
            limit: The seconds that the tests may take together; at least one test is returned.
        """
        contexts = self._data.contexts_by_lineno(str(self._tree / mutant.path))
        reaching = {test for line in mutant.statement for test in contexts.get(line, [])}
        if not any(reaching):  # the line runs at import, or in another process: any test of the file may notice it
            reaching = {test for tests in contexts.values() for test in tests}
        known = {test.rpartition("|")[0] for test in reaching} & self.seconds.keys()
        chosen: list[str] = []
        for test in sorted(known, key=lambda test: (self.seconds[test], test)):
            limit -= self.seconds[test]
            if limit < 0 and chosen:
                break
            chosen.append(test)
        return chosen, len(known) - len(chosen)
