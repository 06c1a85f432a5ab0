from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from osd.config import Settings
from tests.unit.serving.answers import asking
from tests.unit.serving.scripted import ScriptedService


@pytest.fixture
def make_service(tmp_path: Path) -> Callable[..., ScriptedService]:
    def make(**serving: Any) -> ScriptedService:
        return ScriptedService(Settings(home=tmp_path, serving=serving))

    return make


@pytest.fixture
def service(make_service: Callable[..., ScriptedService]) -> ScriptedService:
    return make_service()


@pytest.fixture
def client(service: ScriptedService) -> TestClient:
    return asking(service)
