"""Table of faults, promises and results, printed by ``make faults`` and ``make cluster``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

MARKS = ("fault and not cluster", "cluster")
"""Mark expressions of runs that print the table."""
HEAD = ("fault", "promised", "held", "lost", "errors that clients saw", "seconds until well")


@dataclass
class Aftermath:
    """Results of a test that causes a fault; None means not checked.

    Attributes:
        lost: lost requests or records.
        errors: errors that clients saw.
        seconds: time until everything worked again.
    """

    lost: str | None = None
    errors: str | None = None
    seconds: float | None = None


_AFTERMATHS = pytest.StashKey[dict[str, Aftermath]]()
_FAULTS = pytest.StashKey[dict[str, tuple[str, str]]]()


@pytest.fixture
def aftermath(request: pytest.FixtureRequest) -> Aftermath:
    """Results that a test marked as a ``fault`` records for the table."""
    return request.config.stash.setdefault(_AFTERMATHS, {}).setdefault(request.node.nodeid, Aftermath())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember the faults in the order of their tests."""
    marked = {item.nodeid: item.get_closest_marker("fault") for item in items}
    config.stash[_FAULTS] = {node: mark.args for node, mark in marked.items() if mark is not None}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a row for each fault, with the results of all its tests, in runs that select faults."""
    if config.option.markexpr not in MARKS:
        return
    kinds = {"passed": "yes", "skipped": "not tried here", "failed": "NO", "error": "NO"}
    held = {report.nodeid: word for kind, word in kinds.items() for report in terminalreporter.stats.get(kind, [])}
    aftermaths = config.stash.get(_AFTERMATHS, {})
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node, fault in config.stash[_FAULTS].items():
        if node in held:
            tests[fault].append(node)
    terminalreporter.section("faults")
    for cells in (HEAD, ["---"] * len(HEAD)):
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for fault, nodes in tests.items():
        results = [aftermaths.get(node, Aftermath()) for node in nodes]
        seconds = [result.seconds for result in results if result.seconds is not None]
        slowest = f"{max(seconds):.1f}" if seconds else ""
        cells = (*fault, _distinct(held[node] for node in nodes), _distinct(result.lost for result in results))
        terminalreporter.write_line(
            f"| {' | '.join((*cells, _distinct(result.errors for result in results), slowest))} |"
        )


def _distinct(texts: Iterable[str | None]) -> str:
    """Join the distinct texts in order."""
    return "; ".join(dict.fromkeys(text for text in texts if text))
