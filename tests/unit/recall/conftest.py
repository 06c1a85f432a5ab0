from __future__ import annotations

import pytest

from osd.recall.memory import Backend
from tests.unit.recall.backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param
