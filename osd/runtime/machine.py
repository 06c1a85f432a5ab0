"""This machine: its CPU, and the instructions that it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from osd.runtime.native import libraries

_CPU_INFO = Path("/proc/cpuinfo")
_EXTENSIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""What decides how fast a forward of several rows is, by the kernel's names."""


def cpu_fields(text: str | None = None) -> dict[str, str]:
    """What the operating system says of the first CPU, nothing where it does not; ``text`` stands for its words."""
    if text is None:
        text = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.is_file() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


@dataclass(frozen=True)
class Machine:
    """A CPU by its kind, the ``cores`` that there are, those ``extensions`` that matter, and what computes on it."""

    cpu: str
    cores: int
    extensions: tuple[str, ...]
    kernels: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls.of(cpu_fields(), os.cpu_count() or 1, libraries())

    @classmethod
    def of(cls, info: dict[str, str], cores: int, runnable: Sequence[str]) -> Machine:
        """The one whose first CPU has these fields, and that runs the first of these libraries of kernels, if any."""
        name = info.get("model name", "a CPU of unknown kind")
        if "cpu family" in info:
            name += f", family {info['cpu family']}, model {info.get('model', '?')}"
        has = info.get("flags", "").split()
        kernels = Path(runnable[0]).name.split(".")[0].removeprefix("_kernels_") if runnable else "PyTorch"
        return cls(name, cores, tuple(one for one in _EXTENSIONS if one in has), kernels)

    def __str__(self) -> str:
        """In words."""
        has = " ".join(self.extensions) or "no extensions that are known"
        return f"{self.cores} cores of {self.cpu}; it has {has}; kernels: {self.kernels}"
