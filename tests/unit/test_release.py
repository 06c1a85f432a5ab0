"""Version of the project in all files that name it, and the citation file."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import osd
from tests.release.__main__ import VERSIONED, ReleaseError, version, without_kernels

ROOT = Path(__file__).parents[2]
CITATION = ROOT / "CITATION.cff"


def test_all_files_name_the_version_of_the_project():
    assert version() == osd.__version__


def test_release_names_a_file_with_another_version(monkeypatch):
    monkeypatch.setitem(VERSIONED, "LICENSE", r"Version (\d\.\d)")
    with pytest.raises(ReleaseError, match=r"LICENSE has version 2\.0, and pyproject.toml has"):
        version()


def test_citation_agrees_with_the_project():
    citation, project = yaml.safe_load(CITATION.read_text()), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert citation["license"] == project["project"]["license"]
    assert citation["abstract"] == project["project"]["description"]


def test_addresses_of_the_project_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Homepage"] == yaml.safe_load(CITATION.read_text())["repository-code"]
    assert all(url.startswith(project["urls"]["Homepage"]) for url in project["urls"].values())


def test_pure_wheel_has_only_the_extension_modules_less():
    project = tomllib.loads(text := (ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"].pop("ext-modules")
    assert tomllib.loads(without_kernels(text)) == project


def test_citation_is_valid():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    done = subprocess.run([*command, "--default-filetype", "yaml", str(CITATION)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
