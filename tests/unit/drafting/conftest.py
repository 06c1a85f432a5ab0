"""A small target for drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"))
