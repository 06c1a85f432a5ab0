"""The version, which several files name."""

from __future__ import annotations

import pytest

import osd
from tests.release.__main__ import VERSIONED, ReleaseError, version


def test_all_files_name_the_version_of_the_project():
    assert version() == osd.__version__


def test_release_names_a_file_with_another_version(monkeypatch):
    monkeypatch.setitem(VERSIONED, "LICENSE", r"Version (\d\.\d)")
    with pytest.raises(ReleaseError, match=r"LICENSE has version 2\.0, and pyproject.toml has"):
        version()
