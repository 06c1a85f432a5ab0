"""Cores and memory that a process may use: its affinity, and the limits of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osd.runtime.device import cores
from osd.runtime.machine import cpu_quotas, memory_limits


def groups(directory: Path, membership: str, name: str, limits: dict[str, str]) -> tuple[Path, Path]:
    (directory / "cgroup").write_text(membership)
    for group, limit in limits.items():
        (directory / "fs" / group).mkdir(parents=True, exist_ok=True)
        (directory / "fs" / group / name).write_text(limit)
    return directory / "cgroup", directory / "fs"


@pytest.mark.parametrize(("membership", "limits", "quotas"), [
    ("0::/\n", {"": "200000 100000\n"}, [2]),
    ("0::/\n", {"": "50000 100000\n"}, [1]),
    ("0::/\n", {"": "250000 100000\n"}, [3]),
    ("0::/\n", {"": "max 100000\n"}, []),
    ("0::/a/b\n", {"a/b": "max 100000\n", "a": "300000 100000\n", "": "400000 100000\n"}, [3, 4]),
    ("12:cpu,cpuacct:/a\n0::/a\n", {"a": "100000 100000\n"}, [1]),
    ("12:cpu,cpuacct:/a\n", {"a": "100000 100000\n"}, []),
    ("0::/a\n", {}, []),
])  # fmt: skip
def test_quota_is_that_of_the_group_and_of_groups_above(
    tmp_path: Path, membership: str, limits: dict[str, str], quotas: list[int]
) -> None:
    assert list(cpu_quotas(*groups(tmp_path, membership, "cpu.max", limits))) == quotas


def test_memory_is_limited_by_the_group_and_by_groups_above(tmp_path: Path) -> None:
    limits = {"a/b": "max\n", "a": "3000000000\n", "": "max\n"}
    assert list(memory_limits(*groups(tmp_path, "0::/a/b\n", "memory.max", limits))) == [3_000_000_000]


def test_missing_control_groups_limit_nothing(tmp_path: Path) -> None:
    assert list(cpu_quotas(tmp_path / "cgroup", tmp_path)) == []
    assert list(memory_limits(tmp_path / "cgroup", tmp_path)) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_all_cores_are_those_of_the_affinity() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); from osd.runtime.device import cores; print(cores(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert cores(3) == 3
