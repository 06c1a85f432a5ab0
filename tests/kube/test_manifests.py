"""Manifests for Kubernetes: rendered, valid, and without unknown fields; `make kube`."""

from __future__ import annotations

import copy

import jsonschema
import kubernetes_validate
import pytest

from tests.kube.manifests import ray_service, rendered, strict_schema

pytestmark = pytest.mark.kube

VARIANTS = ("base", "gpu", "vllm")
KUBERNETES = ("1.32", kubernetes_validate.latest_version())
"""The oldest maintained version of Kubernetes at the time of writing, and the newest known one."""


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rendered_manifests_are_valid_for_kubernetes(variant: str, version: str):
    for manifest in rendered(variant):
        if manifest["kind"] != "RayService":
            kubernetes_validate.validate(manifest, version, strict=True)
    cluster = ray_service(variant)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_service_has_only_fields_that_kuberay_knows(variant: str):
    validator = jsonschema.Draft202012Validator(strict_schema())
    service = ray_service(variant)
    assert [f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(service)] == []
    misspelt = copy.deepcopy(service)
    misspelt["spec"]["rayClusterConfig"]["authOption"] = {}
    assert list(validator.iter_errors(misspelt))


def test_images_of_all_pods_are_set_in_one_place():
    for variant, tag in (("base", "0.2.0"), ("gpu", "0.2.0-gpu"), ("vllm", "0.2.0-vllm")):
        cluster = ray_service(variant)["spec"]["rayClusterConfig"]
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        images = {part["image"] for group in groups for part in group["template"]["spec"]["containers"]}
        assert images == {f"registry.example.org/osd:{tag}"}


def test_replicas_with_a_gpu_have_limits_of_their_own():
    base, gpu = (ray_service(variant)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0] for variant in ("base", "gpu"))
    small, large = (group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in (base, gpu))
    assert small["memory"] != large["memory"]
    assert large["nvidia.com/gpu"] == "1"
