"""Build a release into dist/ and check it: `make release`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
CYCLONEDX = "cyclonedx-bom==7.5.0"
VERSIONED = {
    "CHANGELOG.md": r"\A# Changelog\s+## (\S+)",
    "CITATION.cff": r"\nversion: (\S+)",
    "CONTRIBUTING.md": r"(?:osd:|osd_llm-| v)(\d+\.\d+\.\d+)",
    "deploy/Dockerfile": r"-t osd:(\d+\.\d+\.\d+)",
    "deploy/compose.gpu.yaml": r"image: osd:(\S+)-gpu",
    "deploy/compose.vllm.yaml": r"image: osd:(\S+)-vllm",
    "deploy/compose.yaml": r"image: osd:(\S+)",
    "deploy/kuberay/base/kustomization.yaml": r"newTag: ([^\s}]+)",
    "deploy/kuberay/gpu/kustomization.yaml": r"newTag: ([^\s}]+)-gpu",
    "deploy/kuberay/vllm/kustomization.yaml": r"newTag: ([^\s}]+)-vllm",
    "docs/cluster.md": r"osd:(\d+\.\d+\.\d+)",
    "osd/__init__.py": r'__version__ = "(\S+)"',
    "ray_cluster.yaml": r"image: osd:(\S+)",
}
"""Files that name the version, and where."""


class ReleaseError(Exception):
    """Error of a part of the release; its message is one line that says what to correct."""


def version() -> str:
    """Return the version of the project.

    Raises:
        ReleaseError: a file names another version.
    """
    number: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, pattern in VERSIONED.items():
        named: set[str] = set(re.findall(pattern, (ROOT / name).read_text()))
        if named != {number}:
            found = f"version {', '.join(sorted(named))}" if named else "no version"
            raise ReleaseError(f"{name} has {found}, and pyproject.toml has {number}: make them equal")
    return number


def build() -> str:
    """Build the source archive, and wheels with and without kernels from its content; return their names and sizes."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    source = DIST / build_meta.build_sdist(str(DIST))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--quiet"]
        command += ["--no-build-isolation", "--wheel-dir", str(DIST), str(unpacked)]
        _run(command)
        project = unpacked / "pyproject.toml"
        project.write_text(without_kernels(project.read_text()))
        shutil.rmtree(unpacked / "build", ignore_errors=True)
        _run(command)
    wheels: list[str] = []
    for wheel in sorted(DIST.glob("*.whl")):
        kernels = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        wheels.append(f"{_size(wheel)} with {len(kernels)} kernel libraries")
    return "; ".join([_size(source), *wheels])


def without_kernels(project: str) -> str:
    """Return the content of pyproject.toml without the extension modules, for a wheel of any platform."""
    return re.sub(r"^\[\[tool\.setuptools\.ext-modules\]\]\n(?:[^\[\n].*\n)+", "", project, flags=re.MULTILINE)


def bill() -> str:
    """Write the bill of materials of the image in CycloneDX's format; return its name and content."""
    file = DIST / f"osd-llm-{version()}.cdx.json"
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "venv", folder])
        _run([f"{folder}/bin/pip", "install", "--disable-pip-version-check", "--quiet", CYCLONEDX])
        options = ["--pyproject", str(ROOT / "pyproject.toml"), "--output-format", "JSON", "--output-file", str(file)]
        _run([f"{folder}/bin/cyclonedx-py", "requirements", *options, str(ROOT / "deploy/requirements.txt")])
    return f"{file.name}: {len(json.loads(file.read_text())['components'])} packages"


def main() -> None:
    """Run all parts and print a line for each; exit with 1 after the first error."""
    parts: dict[str, Callable[[], str]] = {"version": version, "build": build, "bill of materials": bill}
    begun = time.monotonic()
    for name, part in parts.items():
        try:
            print(f"{name:18} {part()}", flush=True)
        except ReleaseError as error:
            sys.exit(f"{name:18} {error}")
    print(f"{'time':18} {time.monotonic() - begun:.0f} s; CONTRIBUTING.md has the commands that publish dist/")


def _size(file: Path) -> str:
    return f"{file.name} {file.stat().st_size / (1 << 20):.1f} MiB"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ReleaseError(f"{' '.join(command[:4])} failed: {lines[-1] if lines else done.returncode}")


if __name__ == "__main__":
    main()
