"""Virtual environments of peers, created once under ``cache``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from osd.cli.common import RunError
from osd.runtime.machine import cpu_fields

_GGML_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
"""CPU extensions to build llama.cpp with, by the kernel's name; AMX is excluded, because its build has crashed."""

_READ_REQUIREMENTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
every = [Requirement(line) for line in importlib.metadata.requires(sys.argv[1]) or ()]
needed = [r for r in every if r.name not in sys.argv[2:] and (r.marker is None or r.marker.evaluate({"extra": ""}))]
for requirement in needed:
    requirement.marker = None
print(json.dumps([str(requirement) for requirement in needed]))
"""


class PeerError(RunError):
    """Error of a peer's installation or run; the message is the last line of its error output."""


@dataclass(frozen=True)
class PeerEnvironment:
    """Virtual environment with ``requirement`` and ``pins``; dependencies in ``without`` are left out."""

    name: str
    requirement: str
    without: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    cmake: Callable[[], Sequence[str]] = tuple

    def python(self, cache: Path, report: Callable[[str], None]) -> Path:
        """Return the interpreter; install the packages first if necessary.

        Raises:
            PeerError: the installation failed.
        """
        folder = cache / "peers" / self.name
        python, stamp = folder / "bin" / "python", folder / "installed.json"
        contents = json.dumps([self.requirement, *self.pins, self.without, list(self.cmake())])
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f".{self.name}.lock")):
            if stamp.is_file() and stamp.read_text(encoding="utf-8") == contents:
                return python
            report(f"installing {self.requirement}")
            stamp.unlink(missing_ok=True)
            run([sys.executable, "-m", "venv", "--clear", str(folder)])
            pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
            if self.without:
                run([*pip, "--no-deps", self.requirement])
                name = self.requirement.partition("==")[0]
                needed = json.loads(run([str(python), "-c", _READ_REQUIREMENTS, name, *self.without]))
                run([*pip, *self.pins, *needed])
            else:
                run([*pip, self.requirement, *self.pins], CMAKE_ARGS=" ".join(self.cmake()))
            stamp.write_text(contents, encoding="utf-8")
        return python


def run(command: Sequence[str], **environment: str) -> str:
    """Run a command and return its output.

    Raises:
        PeerError: the command failed.
    """
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if process.returncode:
        raise PeerError(last_error(process.stderr) or f"exit code {process.returncode}")
    return process.stdout


def last_error(text: str) -> str:
    """Return the last line that mentions an error, or else the last line."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:300]


def ggml_flags(cpu_info: str | None = None) -> tuple[str, ...]:
    """Return the CMake arguments of llama.cpp for this CPU; ``cpu_info`` replaces the kernel's description in tests."""
    flags = cpu_fields(cpu_info).get("flags", "").split()
    options = [f"-DGGML_{option}={'ON' if name in flags else 'OFF'}" for name, option in _GGML_FLAGS.items()]
    return ("-DGGML_NATIVE=OFF", *options, "-DLLAVA_BUILD=OFF")
