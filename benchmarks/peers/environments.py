"""A virtual environment for each engine, made once under the home directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from osd.cli.common import CommandError
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
"""Extensions of the CPU that llama.cpp is built with, by the kernel's name; not AMX, whose build has crashed."""

_READ_REQUIREMENTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
asked = [Requirement(line) for line in importlib.metadata.requires(sys.argv[1]) or ()]
wanted = [r for r in asked if r.name not in sys.argv[2:] and (r.marker is None or r.marker.evaluate({"extra": ""}))]
for requirement in wanted:
    requirement.marker = None
print(json.dumps([str(requirement) for requirement in wanted]))
"""


class PeerError(CommandError):
    """A peer cannot be installed or does not run; the message is its last line of error."""


@dataclass(frozen=True)
class Environment:
    """What is installed: ``requirement`` beside ``pins``, and of what that needs all but ``without``."""

    name: str
    requirement: str
    without: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    cmake: Callable[[], Sequence[str]] = tuple

    def python(self, home: Path, report: Callable[[str], None]) -> Path:
        """The interpreter, after everything is installed.

        Raises:
            PeerError: it cannot be installed.
        """
        place = home / "peers" / self.name
        python, done = place / "bin" / "python", place / "installed.json"
        wanted = json.dumps([self.requirement, *self.pins, self.without, list(self.cmake())])
        place.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(place.with_name(f".{self.name}.lock")):
            if done.is_file() and done.read_text(encoding="utf-8") == wanted:
                return python
            report(f"installing {self.requirement}")
            done.unlink(missing_ok=True)
            run([sys.executable, "-m", "venv", "--clear", str(place)])
            pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
            if self.without:
                run([*pip, "--no-deps", self.requirement])
                name = self.requirement.partition("==")[0]
                needed = json.loads(run([str(python), "-c", _READ_REQUIREMENTS, name, *self.without]))
                run([*pip, *self.pins, *needed])
            else:
                run([*pip, self.requirement, *self.pins], CMAKE_ARGS=" ".join(self.cmake()))
            done.write_text(wanted, encoding="utf-8")
        return python


def run(command: Sequence[str], **environment: str) -> str:
    """What a command prints.

    Raises:
        PeerError: it fails.
    """
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise PeerError(last_error(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def last_error(text: str) -> str:
    """The last line that says what went wrong, else the last one."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or [""])[-1][:300]


def ggml_flags(cpu_info: str | None = None) -> tuple[str, ...]:
    """CMake's arguments for a llama.cpp with the extensions of this CPU; ``cpu_info`` stands for the kernel's."""
    flags = cpu_fields(cpu_info).get("flags", "").split()
    known = [f"-DGGML_{option}={'ON' if name in flags else 'OFF'}" for name, option in _GGML_FLAGS.items()]
    return ("-DGGML_NATIVE=OFF", *known, "-DLLAVA_BUILD=OFF")
