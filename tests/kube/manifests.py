"""Rendered manifests of ``deploy/kuberay``, and the schema of KubeRay's custom resource."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERAY = Path(__file__).parents[2] / "deploy" / "kuberay"
CRD = os.environ.get("OSD_TEST_CRD")
"""Path of KubeRay's ``ray.io_rayservices.yaml``."""


@cache
def rendered(variant: str) -> list[dict[str, Any]]:
    """Return the manifests of a folder of ``deploy/kuberay``; skip the test without kustomize."""
    for command in (("kubectl", "kustomize"), ("kustomize", "build")):
        if shutil.which(command[0]):
            done = subprocess.run([*command, KUBERAY / variant], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("nothing renders the manifests here: install kubectl or kustomize")


def ray_service(variant: str) -> dict[str, Any]:
    """Return the RayService."""
    (service,) = [manifest for manifest in rendered(variant) if manifest["kind"] == "RayService"]
    return service


def strict_schema() -> dict[str, Any]:
    """Return the JSON schema of a RayService that refuses unknown fields, which an API server drops silently.

    The test is skipped without the file of KubeRay.
    """
    if not CRD:
        file = "ray-operator/config/crd/bases/ray.io_rayservices.yaml"
        pytest.skip(f"no schema of the RayService here: make kube CRD=FILE, with {file} of KubeRay's source")
    versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    (version,) = [version for version in versions if version["name"] == "v1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    strict = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        strict = {"type": ["integer", "string"]}
    if "properties" in schema:
        strict["properties"] = {key: _strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            strict["additionalProperties"] = False
    for key in ("additionalProperties", "items"):
        if isinstance(schema.get(key), dict):
            strict[key] = _strict(schema[key])
    return strict
