"""What tests of every kind share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["tests.fault_table"]

# The suite runs beside Ray workers and servers of its own: more threads than cores only make it slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("OSD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run on the CPU; it is read when Triton is imported


@pytest.fixture(autouse=True)
def _environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith("OSD_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small target of random weights and a tokenizer of single bytes."""
    from tests.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits until a condition holds, and fails when it does not within ten seconds."""

    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.01)

    return wait
