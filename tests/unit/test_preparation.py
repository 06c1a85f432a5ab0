"""Settings that contradict each other are refused before anything starts, by one sentence that names them."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.preparation import check_settings
from osd.config import ConfigError, Settings
from osd.runtime.native import kernels

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a biased pair": (
        {"growth": {"kind": "top_k_tree"}, "verification": "siblings"},
        "siblings would bias the output: growth top_k_tree",
    ),
    "a draft that no slot has room for": (
        {"growth": {"kind": "chain", "depth": 9}, "engine": {"max_draft": 8}},
        r"growth\.kind chain drafts up to 9 tokens, and engine\.max_draft is 8",
    ),
    "a file of keys that is not there": (
        {"serving": {"keys_file": "/nowhere"}},
        r"serving\.keys_file /nowhere cannot be",
    ),
    "a tenant's domain as the service's own": ({"domain": "acme.code"}, r"domain acme\.code is a tenant's"),
    "int8 on a GPU": ({"target": {"weights": "int8", "device": "cuda"}}, r"target\.weights int8 needs a CPU with AVX2"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_cannot_work_together_is_refused_by_name(name: str) -> None:
    settings, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        check_settings(Settings(**settings))


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
    if kernels() is not None:
        check_settings(Settings(target={"weights": "int8"}))  # type: ignore[arg-type]
