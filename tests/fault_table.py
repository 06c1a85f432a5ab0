"""What ``make faults`` prints: every fault that was tried, what is promised of it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

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
    """Print the table where faults were what was asked for."""
    if config.option.markexpr != "fault":
        return
    kinds = {"passed": "yes", "skipped": "not tried here", "failed": "NO", "error": "NO"}
    held = {report.nodeid: word for kind, word in kinds.items() for report in terminalreporter.stats.get(kind, [])}
    noted = config.stash.get(_AFTERMATHS, {})
    terminalreporter.section("faults")
    for cells in (HEAD, ["---"] * len(HEAD)):
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for node, (what, promise) in config.stash[_FAULTS].items():
        after = noted.get(node, Aftermath())
        if node in held:
            seconds = "" if after.seconds is None else f"{after.seconds:.1f}"
            row = (what, promise, held[node], after.lost or "", after.errors or "", seconds)
            terminalreporter.write_line(f"| {' | '.join(row)} |")
