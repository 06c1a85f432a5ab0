"""Refusal of taps, and of dashboards of ``osd learn``, that are open to other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.learning import Learning
from osd.capture.server import RedisSetupError
from osd.config import ConfigError, Settings
from osd.tap.agreement import ServedTarget
from osd.tap.app import Tap, check_exposure
from osd.tap.upstream import Upstream

ALL = "0.0.0.0"  # noqa: S104
OPEN = r"^tap.host .* is open to other machines without a key: .* or serving.insecure=true$"


@pytest.mark.parametrize("host", [ALL, "::", "192.0.2.7", "example.org"])
def test_tap_on_a_public_host_is_refused(host: str) -> None:
    settings = Settings(tap={"host": host}, serving={"api_key": "k"})  # a tap requires no key
    with pytest.raises(ConfigError, match=OPEN):
        Tap(settings, Upstream("http://127.0.0.1:1"), ServedTarget(frozenset()), "redis://127.0.0.1:1")


@pytest.mark.parametrize("values", [
    {"tap": {"host": "127.0.0.2"}},
    {"tap": {"host": ALL, "allowed_hosts": ["osd"]}},
    {"tap": {"host": ALL}, "serving": {"insecure": True}},
])  # fmt: skip
def test_protected_tap_is_accepted(values: dict[str, Any]) -> None:
    check_exposure(Settings(**values))


def test_dashboard_on_a_public_host_needs_a_key(tmp_path: Path) -> None:
    values: dict[str, Any] = {"home": tmp_path, "redis_url": "redis://127.0.0.1:1", "tap": {"host": ALL}}
    with pytest.raises(ConfigError, match=OPEN):
        Learning(Settings(**values)).start()
    with pytest.raises(RedisSetupError):  # the next step of the start
        Learning(Settings(**values, serving={"api_key": "k"})).start()
