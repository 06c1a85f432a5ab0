"""Runs of pytest in copies of the tree. Each is a fork of this process, which has imported torch and the like."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

# Modules that this process has imported cannot have rewritten asserts, which only improve messages.
OPTIONS = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
# Settings that libraries read when they are imported, as in tests/conftest.py.
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}


def copy_tree(root: Path, copy: Path) -> Path:
    """Copy the tree without its caches; the copy shares the environment."""
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    (copy / ".venv").symlink_to((root / ".venv").resolve())
    return copy


class Notes:
    """Plugin of pytest that writes the seconds of each test, the failed tests and the imported libraries to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        if report.failed:
            self._failed.append(report.nodeid)
        if not report.skipped:
            self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
        libraries = [name for name, file in files.items() if "site-packages" in file]
        self._path.write_text(json.dumps({"seconds": self._seconds, "failed": self._failed, "libraries": libraries}))


class Run:
    """One run of pytest in its own process group.

    Args:
        tree: A copy of the tree.
        arguments: The arguments of pytest.
        limit: The time limit in seconds.

    Attributes:
        log: The file with the output.
        started: The time of the start, on the monotonic clock.
        status: The exit status of pytest; None while it runs and after the time limit.
    """

    def __init__(self, tree: Path, arguments: list[str], limit: float) -> None:
        self.log = tree / ".log"
        self.started = time.monotonic()
        self.status: int | None = None
        self._notes = tree / ".notes.json"
        self._notes.unlink(missing_ok=True)
        self._deadline = self.started + limit
        self._descendants: set[psutil.Process] = set()
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            _run_pytest(tree, arguments, self.log, self._notes)
        atexit.register(self._end)

    def is_over(self) -> bool:
        """Return whether the run has ended. At the time limit, end it; then end every process that it left."""
        child, status = os.waitpid(self._child, os.WNOHANG)
        if child:
            self.status = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < self._deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._descendants.update(psutil.Process(self._child).children(recursive=True))
            return False
        self._end()
        if not child:
            os.waitpid(self._child, 0)
        return True

    def notes(self) -> dict[str, Any]:
        """Return the results of the plugin: `seconds`, `failed` and `libraries`."""
        empty = '{"seconds": {}, "failed": [], "libraries": []}'
        return json.loads(self._notes.read_text() if self._notes.exists() else empty)

    def _end(self) -> None:
        atexit.unregister(self._end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        for process in self._descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def import_libraries(names: list[str]) -> None:
    """Import libraries here, so that later runs find them imported."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _run_pytest(tree: Path, arguments: list[str], log: Path, notes: Path) -> None:
    """Turn a fork into a process that works in the copy; run pytest and exit."""
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(Path.cwd())))]
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        status = int(pytest.main([*OPTIONS, *arguments], plugins=[Notes(notes)]))
    finally:
        os._exit(status)
