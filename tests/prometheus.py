"""Prometheus and promtool, as installed by ``make test`` or by the system."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_LOCAL = Path(sys.prefix) / "prometheus/usr/bin"


def program(name: str) -> str:
    """Return the path of a program; skip the test when it is not installed."""
    path = shutil.which(name) or shutil.which(name, path=str(_LOCAL))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def promtool(*arguments: str | Path) -> str:
    """Run promtool, which must succeed, and return its output."""
    command = [program("promtool"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
