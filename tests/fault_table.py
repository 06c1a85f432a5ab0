"""What ``make faults`` and ``make cluster`` print: what was tried, what is promised of it, and what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

ASKED_FOR = ("fault and not cluster", "cluster")
"""Marks of tests that cause faults."""
HEAD = ("fault", "promised", "held", "lost", "errors that clients saw", "seconds until well")


@dataclass
class Aftermath:
    """What was ``lost``, which ``errors`` clients saw, and the ``seconds`` until all was well; None: not looked at."""

    lost: str | None = None
    errors: str | None = None
    seconds: float | None = None


_AFTERMATHS = pytest.StashKey[dict[str, Aftermath]]()
_FAULTS = pytest.StashKey[dict[str, tuple[str, str]]]()


@pytest.fixture
def aftermath(request: pytest.FixtureRequest) -> Aftermath:
    """What a test that is marked as a ``fault`` notes for the table."""
    return request.config.stash.setdefault(_AFTERMATHS, {}).setdefault(request.node.nodeid, Aftermath())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember the faults in the order of their tests."""
    marked = {item.nodeid: item.get_closest_marker("fault") for item in items}
    config.stash[_FAULTS] = {node: mark.args for node, mark in marked.items() if mark is not None}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a row for each fault, of all tests that cause it, where faults were what was asked for."""
    if config.option.markexpr not in ASKED_FOR:
        return
    kinds = {"passed": "yes", "skipped": "not tried here", "failed": "NO", "error": "NO"}
    held = {report.nodeid: word for kind, word in kinds.items() for report in terminalreporter.stats.get(kind, [])}
    noted = config.stash.get(_AFTERMATHS, {})
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node, fault in config.stash[_FAULTS].items():
        if node in held:
            tests[fault].append(node)
    terminalreporter.section("faults")
    for cells in (HEAD, ["---"] * len(HEAD)):
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for fault, nodes in tests.items():
        after = [noted.get(node, Aftermath()) for node in nodes]
        seconds = [one.seconds for one in after if one.seconds is not None]
        slowest = f"{max(seconds):.1f}" if seconds else ""
        cells = (*fault, _each(held[node] for node in nodes), _each(one.lost for one in after))
        terminalreporter.write_line(f"| {' | '.join((*cells, _each(one.errors for one in after), slowest))} |")


def _each(said: Iterable[str | None]) -> str:
    """Everything that was said, once."""
    return "; ".join(dict.fromkeys(one for one in said if one))
