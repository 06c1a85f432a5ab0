"""Fixtures and settings of all tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.leftovers import Leftovers
from tests.waiting import wait_until

pytest_plugins = ["tests.fault_table"]

# Ray workers and servers run at the same time, so more threads than cores only slow the suite down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("OSD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # run GPU kernels on the CPU; Triton reads it at import

_END_TO_END = "end-to-end"


class _SharedServices(LoadFileScheduling):
    """Scheduler that runs the tests of a file in one process, and all end-to-end tests, which share a service.

    Those begin, then files with few tests, which are the slow ones: so all processes end at about the same time.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        queue = self.workqueue
        queue.move_to_end(min(queue, key=lambda scope: (scope != _END_TO_END, len(queue[scope]))), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _END_TO_END if file.startswith("tests/e2e/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return the scheduler for ``--dist loadfile``."""
    return _SharedServices(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fail when a server or worker that a test started outlives the session."""
    leftovers = Leftovers()
    yield
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not leftovers.running(), every=0.1)
    assert leftovers.running() == []


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's ``OSD_`` settings from the environment."""
    for name in list(os.environ):
        if name.startswith("OSD_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a small target of random weights and a tokenizer of single bytes."""
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Function that polls a condition until it holds and returns its value; see ``wait_until``."""
    return wait_until


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    """Exit stack of the test, which closes its resources in reverse order."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Event loop of async tests."""
    return "asyncio"
