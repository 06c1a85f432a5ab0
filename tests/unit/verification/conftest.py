from __future__ import annotations

import pytest

from osd.verification import tree


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that draws use several of them in a tiny vocabulary."""
    monkeypatch.setattr(tree, "BLOCK", 2)
