"""Table that ``make faults`` and ``make cluster`` print: faults, promises and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

FAULT_MARKS = ("fault and not cluster", "cluster")
"""Mark expressions of the two commands."""
HEAD = ("fault", "promise", "kept", "lost", "client errors", "recovery in seconds")


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


_RESULTS = pytest.StashKey[dict[str, FaultResult]]()
_FAULTS = pytest.StashKey[dict[str, tuple[str, str]]]()


@pytest.fixture
def fault_result(request: pytest.FixtureRequest) -> FaultResult:
    """Result of a test with the mark ``fault``, for the table."""
    return request.config.stash.setdefault(_RESULTS, {}).setdefault(request.node.nodeid, FaultResult())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Store the faults in the order of their tests."""
    marked = {item.nodeid: item.get_closest_marker("fault") for item in items}
    config.stash[_FAULTS] = {node: mark.args for node, mark in marked.items() if mark is not None}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one row per fault, over all its tests, when the mark expression selects faults."""
    if config.option.markexpr not in FAULT_MARKS:
        return
    kinds = {"passed": "yes", "skipped": "skipped", "failed": "NO", "error": "NO"}
    kept = {report.nodeid: word for kind, word in kinds.items() for report in terminalreporter.stats.get(kind, [])}
    results = config.stash.get(_RESULTS, {})
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node, fault in config.stash[_FAULTS].items():
        if node in kept:
            tests[fault].append(node)
    terminalreporter.section("faults")
    for cells in (HEAD, ["---"] * len(HEAD)):
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for fault, nodes in tests.items():
        after = [results.get(node, FaultResult()) for node in nodes]
        seconds = [result.seconds for result in after if result.seconds is not None]
        slowest = f"{max(seconds):.1f}" if seconds else ""
        lost, errors = (_join_distinct(getattr(result, name) for result in after) for name in ("lost", "errors"))
        cells = (*fault, _join_distinct(kept[node] for node in nodes), lost, errors, slowest)
        terminalreporter.write_line(f"| {' | '.join(cells)} |")


def _join_distinct(texts: Iterable[str | None]) -> str:
    """Join the distinct texts."""
    return "; ".join(dict.fromkeys(text for text in texts if text))
