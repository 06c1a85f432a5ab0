"""Plant small faults in a package and show the faults that no test notices: `make mutants PATHS=osd/registry`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.reach import Reach, find_tests
from tests.mutants.runs import SETTINGS, Run, copy_tree
from tests.mutants.sampling import Mutant, sample_mutants


class Trial:
    """A mutant in a copy of the tree, and the runs of the tests that reach it.

    A test that fails runs a second time: only if it fails again, it noticed the mutant.

    Attributes:
        noticed: Whether a test failed twice, pytest could not collect the tests, or a run took too long.
        reason: The test that failed, or how the last run ended.
        seconds: The duration of all runs.
    """

    def __init__(self, mutant: Mutant, tree: Path, reach: Reach, limit: float) -> None:
        self.mutant, self.tree = mutant, tree
        self.noticed, self.reason = False, "no test reaches this file"
        self._started, self._reach = time.monotonic(), reach
        self._tests, self._left_out = reach.find_tests(mutant, limit)
        self._failed: str | None = None
        (tree / mutant.path).write_text(mutant.code)
        self._run = self._start(self._tests) if self._tests else None

    def is_over(self, root: Path) -> bool:
        """Return whether all runs have ended; restore the file when they have."""
        if self._run and not self._run.is_over():
            return False
        if self._run and (next_tests := self._choose_next(self._run)):
            self._run = self._start(next_tests)
            return False
        # The old modification time keeps Python from using the compiled mutant.
        shutil.copy2(root / self.mutant.path, self.tree / self.mutant.path)
        self.seconds = round(time.monotonic() - self._started, 1)
        if self._run:
            self.noticed = self._run.status != pytest.ExitCode.OK
            self.reason = self._describe(self._run)
        return True

    def _start(self, tests: list[str]) -> Run:
        names = self.tree / ".tests"
        names.write_text("\n".join(tests))
        # Long enough for a busy machine: only a mutant that never ends reaches it.
        return Run(self.tree, ["-x", f"@{names}"], 60 + 4 * sum(self._reach.seconds[test] for test in tests))

    def _choose_next(self, run: Run) -> list[str]:
        """Return the test that failed for the first time, or the remaining tests after a test that failed only once."""
        failed: list[str] = run.notes()["failed"]
        if run.status == pytest.ExitCode.TESTS_FAILED and self._failed is None and failed:
            self._failed = failed[0]
            return failed[:1]
        if run.status == pytest.ExitCode.OK and self._failed is not None:
            after, self._failed = self._tests.index(self._failed) + 1, None
            return self._tests[after:]
        return []

    def _describe(self, run: Run) -> str:
        if run.status is None:
            return "time limit"
        if run.status == pytest.ExitCode.OK:
            return f"{len(self._tests)} tests passed, {self._left_out} slower tests did not run"
        return self._failed or f"pytest ended with status {run.status}"


def try_mutants(mutants: list[Mutant], root: Path, trees: list[Path], reach: Reach, limit: float) -> Iterator[Trial]:
    """Yield a finished trial of each mutant; as many run at a time as there are copies of the tree."""
    waiting, free, running = mutants[::-1], list(trees), list[Trial]()
    while waiting or running:
        while waiting and free:
            running.append(Trial(waiting.pop(), free.pop(), reach, limit))
        for trial in [trial for trial in running if trial.is_over(root)]:
            running.remove(trial)
            free.append(trial.tree)
            yield trial
        time.sleep(0.1)


def write_report(arguments: argparse.Namespace, trials: list[Trial], seconds: float) -> None:
    """Print the survivors and the score, and write all trials to a JSON file."""
    survivors = [trial for trial in trials if not trial.noticed]
    score = 1 - len(survivors) / max(len(trials), 1)
    for trial in survivors:
        print(f"\n{trial.mutant.path}:{trial.mutant.line} {trial.mutant.operator}: {trial.reason}\n{trial.mutant.diff}")
    fields = [
        {name: getattr(trial.mutant, name) for name in ("path", "line", "operator", "diff")}
        | {name: getattr(trial, name) for name in ("noticed", "reason", "seconds")}
        for trial in trials
    ]
    head = {"paths": arguments.paths, "seed": arguments.seed, "score": score, "seconds": round(seconds)}
    file = Path(f"mutants-{'-'.join(arguments.paths).replace('/', '-')}.json")
    file.write_text(json.dumps(head | {"mutants": fields}, indent=1))
    print(f"\n{len(trials)} mutants, {len(survivors)} survived: score {score:.2f} in {seconds:.0f} s; see {file}")


def main() -> None:
    """Sample the mutants, run the tests, write the report."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("paths", nargs="+", help="packages or modules, such as osd/registry")
    parser.add_argument("--sample", type=int, default=40, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for one mutant, short tests first")
    arguments = parser.parse_args()
    os.environ |= SETTINGS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the runs end as well
    root, started = Path.cwd(), time.monotonic()
    native = root / "osd/runtime/native"
    if native.exists() and not any(native.glob("_kernels_*.so")):
        parser.error("osd/runtime/native has no compiled kernels: run `pip install -e .` in this tree")
    mutants = sample_mutants(root, arguments.paths, arguments.sample, arguments.seed)
    files = find_tests(root, arguments.paths)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        print(f"{len(mutants)} mutants. {len(files)} test files run once to record the lines they reach.", flush=True)
        trees = [copy_tree(root, Path(folder, str(number))) for number in range(arguments.jobs)]
        reach = Reach(trees[0], files, arguments.paths)
        print(f"{len(reach.seconds)} tests passed; failed tests are not used: {reach.failed}", flush=True)
        for trial in try_mutants(mutants, root, trees, reach, arguments.limit):
            verdict = "noticed " if trial.noticed else "SURVIVED"
            where = f"{trial.mutant.path}:{trial.mutant.line}"
            print(verdict, where, trial.mutant.operator, f"({trial.reason}) {trial.seconds} s", flush=True)
            trials.append(trial)
    write_report(arguments, trials, time.monotonic() - started)


if __name__ == "__main__":
    main()
