"""Container engines: docker or podman builds and runs images; buildah alone builds them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
BUILD_SECONDS = 1500
CPU_INDEX = os.environ.get("OSD_TEST_CPU_INDEX")
_PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf")


@dataclass(frozen=True)
class Engine:
    """Program that builds images, with docker's options."""

    program: str

    @property
    def runs(self) -> bool:
        """Whether the program runs containers as docker does."""
        return self.program != "buildah"

    def call(self, *arguments: object, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the program and return its result."""
        command = [self.program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-3000:]}"
        return done

    def build(self, target: str, tag: str) -> None:
        """Build a target of ``deploy/Dockerfile``; pip in the build has the configuration of this machine."""
        options: list[object] = ["--file", ROOT / "deploy/Dockerfile", "--target", target, "--tag", tag]
        if self.program != "docker":
            options += ["--layers", "--format", "docker", *_pip_mounts()]
            # Machines that do not reach PyTorch's index have its build for CPUs elsewhere.
            if CPU_INDEX:
                options += ["--build-arg", f"CPU_INDEX={CPU_INDEX}"]
        if self.program == "buildah":
            options += ["--isolation", "chroot"]
        self.call("build", *options, ROOT, seconds=BUILD_SECONDS)

    def bytes_of(self, tag: str) -> int:
        """Return the size of an image."""
        if self.runs:
            return int(self.call("image", "inspect", "--format", "{{.Size}}", tag).stdout)
        with self.filesystem(tag) as root:
            return sum(file.lstat().st_size for file in root.rglob("*") if not file.is_symlink() and file.is_file())

    @contextmanager
    def filesystem(self, tag: str) -> Iterator[Path]:
        """Mount an image of buildah; yield its root."""
        container = self.call("from", "--pull-never", tag).stdout.strip()
        try:
            yield Path(self.call("mount", container).stdout.strip())
        finally:
            self.call("rm", container)


def find_engine() -> Engine:
    """Return the engine of this machine; skip the test without one."""
    for program in ("docker", "podman", "buildah"):
        if shutil.which(program) is None:
            continue
        if subprocess.run([program, "info"], capture_output=True).returncode == 0:
            return Engine(program)
    pytest.skip("no container engine works here: install podman or buildah, or start Docker")


def find_base(engine: Engine) -> None:
    """Make sure that the image that ours is built from is here, or can be pulled.

    Without a registry it is made of Debian's packages by mmdebstrap, if that is installed.
    """
    if (
        engine.call("image" if engine.runs else "inspect", *(["inspect"] * engine.runs), BASE, check=False).returncode
        == 0
    ):
        return
    if engine.call("pull", BASE, check=False).returncode == 0:
        return
    if engine.program == "docker" or shutil.which("mmdebstrap") is None:
        pytest.skip(
            f"{BASE} cannot be pulled: connect to a registry, or install mmdebstrap to build it of Debian's packages"
        )
    done = subprocess.run([Path(__file__).with_name("base.sh"), engine.program, BASE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _pip_mounts() -> list[Any]:
    """Return options that give pip in a build the configuration and the certificates of this machine."""
    options: list[Any] = []
    for file in filter(os.path.exists, _PIP_FILES):
        options += ["--volume", f"{file}:{file}:ro"]
    for name in ("PIP_CERT", "PIP_FIND_LINKS"):
        if (path := os.environ.get(name)) and os.path.exists(path):
            options += ["--volume", f"{path}:{path}:ro", "--env", f"{name}={path}"]
    return options
