"""Table that ``make faults``, ``make cluster`` and ``make vllm`` print: faults, promises and results."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import pytest

FAULT_MARKS = ("fault and not cluster and not vllm", "cluster and not soak", "vllm")
"""Mark expressions of the three commands."""
HEAD = ("fault", "promise", "process", "kept", "lost", "client errors", "recovery in seconds", "date")

PROCESSES = {
    "osd up": r"main\(\) up ", "replica": r"ray::ServeReplica", "proxy": r"ray::ProxyActor", "raylet": r"/raylet ",
    "GCS": r"/gcs_server ", "node": r"/raylet ", "redis-server": r"redis-server",
    "trainer": r"ray::Trainer|-m tests\.\S*(trainer|killed)\b", "training worker": r"RayTrainWorker",
    "osd learn": r"main\(\) learn ", "assembler": r"osd\.vllm\.assembler",
}  # fmt: skip
"""Kinds of processes that a fault can hit, each with a pattern of its command line."""
_EVERY_SECONDS = 0.2


@dataclass
class FaultResult:
    """Result of a fault; None means not measured.

    Attributes:
        lost: the lost data.
        errors: the errors that clients saw.
        seconds: the time until full recovery.
    """

    lost: str | None = None
    errors: str | None = None
    seconds: float | None = None


_FAULT, _RESULT = "fault", "fault_result"
"""Names of the properties of a test's report, which processes of pytest-xdist send to the process of the table."""
_RESULTS = pytest.StashKey[FaultResult]()


@pytest.fixture
def fault_result(request: pytest.FixtureRequest) -> FaultResult:
    """Result of a test with the mark ``fault``, for the table."""
    return request.node.stash.setdefault(_RESULTS, FaultResult())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Store the fault of each test in its report.

    Raises:
        pytest.UsageError: a mark names no process, or a kind of process that is not in ``PROCESSES``.
    """
    for item in items:
        if (mark := item.get_closest_marker("fault")) is None:
            continue
        process = mark.kwargs.get("process", "")
        if not process or not PROCESSES.keys() >= kinds_of(process):
            known = ", ".join(PROCESSES)
            raise pytest.UsageError(
                f'{item.nodeid}: process={process!r} of the mark must be "kind: fault", with a kind of {known}'
            )
        item.user_properties.append((_FAULT, [*mark.args, process]))


def kinds_of(process: str) -> set[str]:
    """Return the kinds of processes in a text like ``"replica, proxy: SIGKILL"``."""
    return set(process.partition(":")[0].split(", "))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of a fault during which no process of each kind in its mark ran."""
    fault = dict(item.user_properties).get(_FAULT)
    if fault is None:
        return (yield)
    try:
        with _searching(kinds_of(fault[-1])) as missing:
            result = yield
    finally:
        item.user_properties.append((_RESULT, asdict(item.stash.get(_RESULTS, FaultResult()))))
    assert not missing, f"no process of this kind ran during the test: {', '.join(sorted(missing))}"
    return result


@contextlib.contextmanager
def _searching(kinds: set[str]) -> Iterator[set[str]]:
    """Search for child processes during the context; yield the kinds that are still missing."""
    stop = threading.Event()

    def search() -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                kinds.difference_update([kind for kind in kinds if re.search(PROCESSES[kind], command)])

    def search_on() -> None:
        while kinds and not stop.wait(_EVERY_SECONDS):
            search()

    search()  # a short test ends before the thread looks
    thread = threading.Thread(target=search_on, daemon=True)
    thread.start()
    try:
        yield kinds
    finally:
        stop.set()
        thread.join()
        search()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one row per fault, over all its tests, when the mark expression selects faults."""
    if config.option.markexpr not in FAULT_MARKS:
        return
    kinds = {"passed": "yes", "skipped": "skipped", "failed": "NO", "error": "NO"}
    last = {
        report.nodeid: (word, report) for kind, word in kinds.items() for report in terminalreporter.stats.get(kind, [])
    }
    tests: dict[tuple[str, ...], list[tuple[str, FaultResult]]] = defaultdict(list)
    for word, report in last.values():
        facts = dict(report.user_properties)
        if _FAULT in facts:
            tests[tuple(facts[_FAULT])].append((word, FaultResult(**facts.get(_RESULT, {}))))
    terminalreporter.section("faults")
    today = datetime.date.today().isoformat()
    for cells in (HEAD, ["---"] * len(HEAD)):
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for fault, outcomes in tests.items():
        seconds = [result.seconds for _, result in outcomes if result.seconds is not None]
        slowest = f"{max(seconds):.1f}" if seconds else ""
        lost, errors = (_join_distinct(getattr(result, name) for _, result in outcomes) for name in ("lost", "errors"))
        cells = (*fault, _join_distinct(word for word, _ in outcomes), lost, errors, slowest, today)
        terminalreporter.write_line(f"| {' | '.join(cells)} |")


def _join_distinct(texts: Iterable[str | None]) -> str:
    """Join the distinct texts."""
    return "; ".join(dict.fromkeys(text for text in texts if text))
