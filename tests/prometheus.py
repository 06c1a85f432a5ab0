"""Prometheus and promtool, where ``make test`` or the system has installed them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_OURS = Path(sys.prefix) / "prometheus/usr/bin"


def program(name: str) -> str:
    """Where it is; the test is skipped where it is not."""
    found = shutil.which(name) or shutil.which(name, path=str(_OURS))
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def promtool(*arguments: str | Path) -> str:
    """What promtool says; it must find nothing wrong."""
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
