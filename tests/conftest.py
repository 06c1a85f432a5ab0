"""Fixtures and settings that all tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leftovers import Leftovers
from tests.waiting import wait_until

pytest_plugins = ["tests.fault_table"]

# The suite runs beside Ray workers and servers of its own: more threads than cores only make it slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("OSD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run on the CPU; it is read when Triton is imported


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fail when a server or worker that a test started outlives the session."""
    leftovers = Leftovers()
    yield
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not leftovers.running(), every=0.1)
    assert leftovers.running() == []


@pytest.fixture(autouse=True)
def _environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's ``OSD_`` settings from the environment."""
    for name in list(os.environ):
        if name.startswith("OSD_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small target of random weights and a tokenizer of single bytes."""
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Poll a condition until it holds and return its value; see ``wait_until``."""
    return wait_until


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    """Closes what a test has opened, the last first."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of async tests."""
    return "asyncio"
