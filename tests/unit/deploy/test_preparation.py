"""Start-up validation: settings that contradict each other or open a service to others are refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deploy.assembly import StartError
from deploy.contradictions import check_exposure, check_settings
from deploy.local_ray import check_token_mode
from deploy.preparation import check_rules
from osd.config import ConfigError, Settings
from osd.runtime.native import kernels

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing file of keys": ({"serving": {"keys_file": "/nowhere"}}, r"serving\.keys_file /nowhere cannot be"),
    "a tenant's domain as the service's own": ({"domain": "acme.code"}, r"domain acme\.code is a tenant's"),
}
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "a biased pair": (
        {"growth": {"kind": "top_k_tree"}, "verification": "siblings"},
        "siblings would bias the output: growth top_k_tree",
    ),
    "a draft larger than a slot's room": (
        {"growth": {"kind": "chain", "depth": 9}, "engine": {"max_draft": 8}},
        r"growth\.kind chain drafts up to 9 tokens, and engine\.max_draft is 8",
    ),
    "fp8 on a CPU": ({"target": {"weights": "fp8", "device": "cpu"}}, r"target\.weights fp8 needs a GPU"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_settings_are_refused_by_name(name: str) -> None:
    settings, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        check_settings(Settings(**settings))


@pytest.mark.parametrize("name", RULES)
def test_incompatible_rules_are_refused_by_name(name: str) -> None:
    settings, message = RULES[name]
    with pytest.raises(ConfigError, match=message):
        check_rules(Settings(**settings))


def test_workers_without_ray_train_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(trainer={"workers": 2})
    check_settings(settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == "pyarrow" else True)
    with pytest.raises(ConfigError, match=r"^trainer\.workers 2 needs .* pip install 'osd-llm\[cluster\]'$"):
        check_settings(settings)
    check_settings(Settings(trainer={"workers": 2, "enabled": False}))
    check_settings(Settings())


def test_default_settings_and_int8_are_accepted() -> None:
    check_settings(Settings())
    check_rules(Settings())
    if kernels() is not None:
        check_rules(Settings(target={"weights": "int8"}))


def test_import_of_embedded_imports_no_torch() -> None:
    code = "import sys; import deploy.embedded; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


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
