"""The project's own files agree with each other and with the code."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import tomllib
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client.parser import text_string_to_metric_families

from deploy.local_ray import BOUNDS, SERVE_ENVIRONMENT
from osd.config import load_settings
from tests.unit.serving.exposition import everything

ROOT = Path(__file__).parents[2]
ROOMS = ("osd", "serving", "trainer", "deploy", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_dependencies_are_pinned_within_their_ranges():
    pinned = pins()
    extras = PROJECT["optional-dependencies"]
    for text in (
        *PROJECT["dependencies"],
        *(text for name in ("serve", "vllm", "cluster", "otel", "s3", "docs", "dev") for text in extras[name]),
    ):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= extras.keys()
            continue
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pinned.values())


def test_vllm_extra_needs_no_package_that_vllm_pins():
    """The service needs newer ones of some; without its extra pip leaves all of these as they are."""
    required = (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"])
    assert {Requirement(text).name for text in required} == {"numpy", "msgspec", "redis"}
    assert Requirement(PROJECT["dependencies"][0]).specifier.contains("2.0.0"), "with as many NumPys as there are"


def test_every_folder_with_code_is_a_package():
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_the_engine_is_a_facade():
    tree = ast.parse((ROOT / "osd/engine/engine.py").read_text())
    (engine,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine")
    assert (engine.end_lineno or 0) - engine.lineno < 150


def test_no_imports_go_in_a_circle():
    graph = grimp.build_graph("osd", "serving", "trainer", "deploy", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert any(imports.values())
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def exported() -> set[str]:
    """The metrics of a service that has done everything once."""
    return {sample.name for family in text_string_to_metric_families(everything()) for sample in family.samples}


def rules() -> list[dict]:
    """Those of all files that the Prometheus of compose reads."""
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    files = [yaml.safe_load((ROOT / "deploy" / name).read_text()) for name in prometheus["rule_files"]]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def assert_known(expressions: list[str]) -> None:
    known = exported() | {rule["record"] for rule in rules() if "record" in rule}
    for expression in expressions:
        names = set(re.findall(r"vllm:\w+|\w+:osd_[\w:]+|\bosd_\w+", expression))
        assert names
        assert names <= known, expression


def test_alerts_use_only_metrics_that_the_service_exports():
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    mounted = [volume.split(":")[0] for volume in compose["services"]["prometheus"]["volumes"]]
    assert {f"./{name}" for name in prometheus["rule_files"]} <= set(mounted)
    assert_known([rule["expr"] for rule in rules()])


def test_grafana_asks_only_for_metrics_that_the_service_exports():
    dashboard = json.loads((ROOT / "deploy/grafana/osd.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    assert_known(expressions)


def test_the_image_and_compose_use_settings_that_exist():
    image = (ROOT / "deploy/Dockerfile").read_text()
    assert SERVE_ENVIRONMENT.items() <= dict(re.findall(r"(RAY_\w+)=(\S+)", image)).items()
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    environ = dict(re.findall(r"(OSD_\w+)=(\S+)", image)) | compose["services"]["osd"]["environment"]
    assert BOUNDS.items() <= dict(re.findall(r"(\w+)=(\S+)", image)).items()
    assert load_settings(None, (), environ).serving.host == "0.0.0.0"  # noqa: S104
