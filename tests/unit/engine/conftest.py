"""Small target for engine tests, and reference answers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tests.unit.engine.harness import LENGTHS, Oracle, prompts


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="session")
def goals(oracle: Oracle) -> list[list[int]]:
    """Greedy answers of transformers to the prompts of ``LENGTHS`` tokens."""
    return oracle.all(prompts(LENGTHS), 24)
