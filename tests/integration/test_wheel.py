"""Installed wheels: with compiled kernels, or with PyTorch only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "osd", "serving", "trainer", "deploy", "benchmarks")
SELF_TEST = """
import sys
from pathlib import Path
import osd
from deploy.doctor.self_test import self_test
from osd.config import Settings
from osd.runtime.native import libraries
assert Path(osd.__file__).is_relative_to(sys.argv[2]), osd.__file__
print(len(libraries()), self_test(Settings(), Path(sys.argv[1])))
"""

pytestmark = pytest.mark.soak


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy of the project without build results."""
    source = tmp_path / "source"
    source.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    return source


def build(source: Path, compiler: str) -> list[str]:
    """Build a wheel and unpack it next to the source; return the names of its kernel libraries."""
    wheels, installed = source.parent / "wheels", source.parent / "installed"
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(wheels), "."], cwd=source, env={**os.environ, "CC": compiler},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = wheels.glob("osd_llm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return sorted(path.name.partition(".")[0] for path in installed.rglob("*.so"))


def self_test(source: Path) -> str:
    """Return the output of the self test of the installed package; it imports nothing from the checkout."""
    folder, installed = source.parent / "model", source.parent / "installed"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST, str(folder), str(installed)], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_wheel_has_kernels_for_every_cpu(source: Path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    assert build(source, "gcc") == ["_kernels_amx", "_kernels_avx2", "_kernels_avx512"]
    libraries, output = self_test(source).split(maxsplit=1)
    assert int(libraries) >= 1
    assert "answers are those of transformers" in output


def test_wheel_without_a_compiler_uses_pytorch(source: Path):
    assert build(source, "/bin/false") == []
    libraries, output = self_test(source).split(maxsplit=1)
    assert int(libraries) == 0
    assert "answers are those of transformers" in output


def test_wheel_of_an_arm_compiler_has_no_kernels(source: Path):
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-gcc")
    assert build(source, compiler) == []
    assert "answers are those of transformers" in self_test(source)
