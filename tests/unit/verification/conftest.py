from __future__ import annotations

import pytest

from osd.verification import tree


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws go through several blocks even in a tiny vocabulary."""
    monkeypatch.setattr(tree, "BLOCK", 2)
