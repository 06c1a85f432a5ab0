"""Description of this machine: its CPU, and the instruction sets that matter."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from osd.runtime.native import libraries

_CPU_INFO = Path("/proc/cpuinfo")
_MEMBERSHIP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_EXTENSIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""Instruction sets that decide the speed of a forward of several rows, by the names of /proc/cpuinfo."""


def cpu_fields(text: str | None = None) -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo, or in ``text``; empty if the file is missing."""
    if text is None:
        text = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.is_file() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@dataclass(frozen=True)
class Machine:
    """CPU of a machine: its name, number of ``cores``, relevant instruction sets, and the kernels that run on it."""

    cpu: str
    cores: int
    extensions: tuple[str, ...]
    kernels: str

    @classmethod
    def here(cls) -> Machine:
        """Return the description of this machine, with the cores that this process may use."""
        return cls.of(cpu_fields(), usable_cores(), libraries())

    @classmethod
    def of(cls, info: dict[str, str], cores: int, runnable: Sequence[str]) -> Machine:
        """Return the description of a machine.

        Args:
            info: fields of its first CPU.
            cores: number of cores.
            runnable: kernel libraries that it can run, the best first.
        """
        cpu = info.get("model name", "a CPU of unknown kind")
        if "cpu family" in info:
            cpu += f", family {info['cpu family']}, model {info.get('model', '?')}"
        has = info.get("flags", "").split()
        kernels = Path(runnable[0]).name.split(".")[0].removeprefix("_kernels_") if runnable else "PyTorch"
        return cls(cpu, cores, tuple(name for name in _EXTENSIONS if name in has), kernels)

    def __str__(self) -> str:
        """Return the description as text."""
        has = " ".join(self.extensions) or "no known extensions"
        return f"{self.cores} cores of {self.cpu}; it has {has}; kernels: {self.kernels}"


def usable_cores() -> int:
    """Return the number of cores that this process may use: affinity and quotas of control groups limit it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *cpu_quotas(_MEMBERSHIP, _GROUPS)])


def usable_memory() -> int:
    """Return the bytes of memory that this process may use at most: limits of control groups count."""
    return min([psutil.virtual_memory().total, *memory_limits(_MEMBERSHIP, _GROUPS)])


def cpu_quotas(membership: Path, root: Path) -> Iterator[int]:
    """Yield the CPU quotas, in whole cores, of a process's control group and of the groups above it.

    Args:
        membership: lists the groups of the process, as in ``/proc/self/cgroup``.
        root: where the file system of control groups, version 2, is mounted.
    """
    for limit, period in _limits("cpu.max", membership, root):
        yield max(1, math.ceil(limit / period))


def memory_limits(membership: Path, root: Path) -> Iterator[int]:
    """Yield the memory limits, in bytes, of the groups that ``cpu_quotas`` reads."""
    for (limit,) in _limits("memory.max", membership, root):
        yield limit


def _limits(name: str, membership: Path, root: Path) -> Iterator[list[int]]:
    try:
        groups = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    group = next((Path(line[3:].strip().lstrip("/")) for line in groups if line.startswith("0::")), None)
    for above in () if group is None else (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # the limit "max" is no number
            yield [int(number) for number in (root / above / name).read_text(encoding="utf-8").split()]
