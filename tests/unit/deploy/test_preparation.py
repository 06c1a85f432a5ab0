"""Start-up validation: contradicting settings are refused with one sentence that names them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deploy.contradictions import check_settings
from deploy.preparation import check_rules
from osd.config import ConfigError, Settings
from osd.runtime.native import kernels

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing file of keys": (
        {"serving": {"keys_file": "/nowhere"}},
        r"serving\.keys_file /nowhere cannot be",
    ),
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
    settings = Settings(trainer={"workers": 2})  # type: ignore[arg-type]
    check_settings(settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == "pyarrow" else True)
    with pytest.raises(ConfigError, match=r"^trainer\.workers 2 needs .* pip install 'osd-llm\[cluster\]'$"):
        check_settings(settings)
    check_settings(Settings(trainer={"workers": 2, "enabled": False}))  # type: ignore[arg-type]
    check_settings(Settings())


def test_default_settings_and_int8_are_accepted() -> None:
    check_settings(Settings())
    check_rules(Settings())
    if kernels() is not None:
        check_rules(Settings(target={"weights": "int8"}))  # type: ignore[arg-type]


def test_import_of_embedded_imports_no_torch() -> None:
    code = "import sys; import deploy.embedded; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
