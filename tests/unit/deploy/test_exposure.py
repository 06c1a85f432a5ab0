"""Refusal of services and Ray servers that are open to other machines or users."""

from __future__ import annotations

import pytest

from deploy.assembly import StartError
from deploy.contradictions import check_exposure
from deploy.local_ray import check_token_mode
from osd.config import ConfigError, Settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])  # noqa: S104
def test_public_host_without_key_is_refused(host: str):
    with pytest.raises(ConfigError, match=r"without a key: set serving.api_key_file .* or serving.insecure=true$"):
        check_exposure(Settings(serving={"host": host}))


@pytest.mark.parametrize(
    "serving",
    [{"api_key": "k"}, {"keys_file": "/keys"}, {"allowed_hosts": ["osd"]}, {"insecure": True}, {"host": "127.0.0.2"}],
)
def test_public_host_with_protection_is_accepted(serving: dict[str, object]):
    check_exposure(Settings(serving={"host": "0.0.0.0", **serving}))  # noqa: S104


def test_ray_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch):
    for mode in ("token", "Token"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        check_token_mode()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(StartError, match=r"^RAY_AUTH_MODE is disabled, .*: unset it$"):
        check_token_mode()
