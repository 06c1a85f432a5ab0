"""Container engines: docker or podman builds and runs images; buildah alone builds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
BUILD_SECONDS = 1500
CPU_INDEX = os.environ.get("OSD_TEST_CPU_INDEX")
_PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip")


@dataclass(frozen=True)
class Engine:
    """Program that builds images, with docker's options."""

    program: str

    def call(self, *arguments: object, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the program and return its result."""
        command = [self.program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-3000:]}"
        return done

    def build(self, target: str, tag: str) -> None:
        """Build a target of ``deploy/Dockerfile``; pip in the build has the configuration of this machine."""
        options: list[object] = ["--file", ROOT / "deploy/Dockerfile", "--target", target, "--tag", tag]
        options += ["--build-arg", f"BASE={BASE}"]  # the image with the pinned hash may not be here
        if self.program != "docker":
            options += ["--layers", "--format", "docker", "--isolation", "chroot", *_pip_mounts()]
        if CPU_INDEX is not None:
            # Machines that do not reach PyTorch's index have its build for CPUs elsewhere.
            options += ["--build-arg", f"CPU_INDEX={CPU_INDEX}"]
        self.call("build", *options, ROOT, seconds=BUILD_SECONDS)

    def has(self, tag: str) -> bool:
        """Return whether an image is here."""
        command = ("inspect", "--type", "image") if self.program == "buildah" else ("image", "inspect")
        return self.call(*command, tag, check=False).returncode == 0

    def bytes_of(self, tag: str) -> float:
        """Return the size of an image."""
        if self.program == "buildah":
            number, unit = json.loads(self.call("images", "--json", tag).stdout)[0]["size"].split()
            return float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
        return float(self.call("image", "inspect", "--format", "{{.Size}}", tag).stdout)

    def refusal(self, tag: str) -> str:
        """Return why containers of an image cannot run here; "" if they can."""
        if self.program == "buildah":
            return "buildah builds images and does not run them: install podman"
        done = self.call("run", "--rm", tag, "true", check=False)
        return (
            f"{self.program} runs no container here: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""
        )

    def output_of(self, tag: str, script: str) -> str:
        """Return the output of a shell script in an image; skip the test if nothing can run it."""
        if not (refusal := self.refusal(tag)):
            return self.call("run", "--rm", "--read-only", "--tmpfs=/tmp", tag, "bash", "-c", script).stdout
        if shutil.which("buildah") is None:
            pytest.skip(refusal)
        inside = Engine("buildah")
        container = inside.call("from", "--pull-never", tag).stdout.strip()
        try:
            return inside.call("run", "--isolation", "chroot", container, "--", "bash", "-c", script).stdout
        finally:
            inside.call("rm", container)


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
    if engine.has(BASE):
        return
    if engine.call("pull", BASE, check=False).returncode == 0:
        return
    if engine.program == "docker" or shutil.which("mmdebstrap") is None:
        pytest.skip(
            f"{BASE} cannot be pulled: connect to a registry, or install mmdebstrap to make it of Debian's packages"
        )
    done = subprocess.run([Path(__file__).with_name("base.sh"), engine.program, BASE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _pip_mounts() -> list[str]:
    """Return options that give pip in a build the configuration, certificates and local packages of this machine."""
    paths = [*_PIP_FILES, *(os.environ.get(name, "") for name in ("PIP_CERT", "PIP_FIND_LINKS"))]
    return [f"--volume={path}:{path}:ro" for path in paths if path and os.path.exists(path)]
