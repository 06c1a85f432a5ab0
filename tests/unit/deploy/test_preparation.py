"""Settings that contradict each other are refused before anything starts, by one sentence that names them."""

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
    "a file of keys that is not there": (
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
    "a draft that no slot has room for": (
        {"growth": {"kind": "chain", "depth": 9}, "engine": {"max_draft": 8}},
        r"growth\.kind chain drafts up to 9 tokens, and engine\.max_draft is 8",
    ),
    "fp8 on a CPU": ({"target": {"weights": "fp8", "device": "cpu"}}, r"target\.weights fp8 needs a GPU"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_by_name(name: str) -> None:
    settings, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        check_settings(Settings(**settings))


@pytest.mark.parametrize("name", RULES)
def test_rules_that_do_not_go_together_are_refused_by_name(name: str) -> None:
    settings, message = RULES[name]
    with pytest.raises(ConfigError, match=message):
        check_rules(Settings(**settings))


def test_several_workers_are_refused_without_the_packages_of_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(trainer={"workers": 2})  # type: ignore[arg-type]
    check_settings(settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == "pyarrow" else True)
    with pytest.raises(ConfigError, match=r"^trainer\.workers 2 needs .* pip install 'osd\[cluster\]'$"):
        check_settings(settings)
    check_settings(Settings(trainer={"workers": 2, "enabled": False}))  # type: ignore[arg-type]
    check_settings(Settings())


def test_defaults_work_together_and_int8_where_the_kernels_are() -> None:
    check_settings(Settings())
    check_rules(Settings())
    if kernels() is not None:
        check_rules(Settings(target={"weights": "int8"}))  # type: ignore[arg-type]


def test_what_is_refused_at_once_imports_nothing_that_computes() -> None:
    code = "import sys; import deploy.embedded; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
