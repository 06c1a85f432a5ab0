"""Checks of a Ray cluster before a deployment, for ``osd doctor --cluster FILE`` and ``osd deploy FILE``."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster import checked_settings
from deploy.deployment import ClusterError, Head, read_deployment, read_token
from deploy.doctor.findings import Finding, redis_finding
from deploy.doctor.node import look
from osd import files
from osd.config import ConfigError, Settings
from osd.config.secrets import KEYS

_NODES_SECONDS = 20.0
_MARK = ".osd-doctor"


def cluster_findings(file: Path) -> Iterator[Finding]:
    """Yield each finding on the cluster for a deployment file; a failure that hides others is the last finding."""
    try:
        settings = checked_settings(read_deployment(file).args)
    except ConfigError as error:
        yield Finding("deployment", "failure", str(error))
        return
    yield Finding("deployment", "ok", f"{file}: target {settings.target.source}, {settings.serving.replicas} replicas")
    try:
        token = read_token()
        yield Finding("token", "ok", "Ray's servers require it")
        version = Head(token).ray_version()
    except ClusterError as error:
        yield Finding("Ray", "failure", str(error))
        return
    if version != ray.__version__:
        says = f"the cluster runs Ray {version}, and here is Ray {ray.__version__}: use one image on all nodes"
        yield Finding("Ray", "failure", says)
        return
    yield Finding("Ray", "ok", f"version {version}")
    yield redis_finding(settings)
    yield from _node_findings(settings)


def _node_findings(settings: Settings) -> Iterator[Finding]:
    """Yield the findings that processes on the nodes make."""
    home, mark = settings.home_dir, secrets.token_hex(16)
    file = home / _MARK
    try:
        files.make_directory(home)
        files.replace(file, mark.encode())
    except OSError as error:
        yield Finding("home", "failure", f"home {home} cannot be written: {error.strerror}")
        return
    try:
        ray.init(
            os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.ERROR, log_to_driver=False, namespace="osd"
        )
        try:
            nodes: dict[str, dict[str, Any]] = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
            yield _places(settings, list(nodes.values()))
            remote = ray.remote(num_cpus=0, max_retries=0)(look)
            looks = {
                remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote(
                    str(file), _secret_files(settings)
                ): node
                for name, node in nodes.items()
            }
            ray.wait(list(looks), num_returns=len(looks), timeout=_NODES_SECONDS)
            seen = {node["NodeManagerAddress"]: _result(result) for result, node in looks.items()}
        finally:
            ray.shutdown()
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        yield Finding("nodes", "failure", f"Ray of this node does not answer: {' '.join(str(error).split())[:300]}")
        return
    finally:
        file.unlink(missing_ok=True)
    silent = sorted(address for address, result in seen.items() if result is None)
    if silent:
        says = f"{', '.join(silent)}: no answer within {_NODES_SECONDS:.0f} seconds"
        yield Finding("nodes", "failure", f"{says}; check that RAY_AUTH_TOKEN_PATH can be read there")
    results = {address: result for address, result in seen.items() if result is not None}
    unshared = sorted(address for address, (content, _) in results.items() if content != mark)
    if unshared:
        says = f"home {home} of {', '.join(unshared)} is not the folder of this node: mount one folder on all nodes"
        yield Finding("home", "failure" if settings.registry.url is None else "warning", says)
    else:
        yield Finding("home", "ok", f"{home} is the same folder on {len(results)} nodes")
    for address, (_, unread) in sorted(results.items()):
        if unread:
            yield Finding("secrets", "failure", f"on {address}: {unread}")


def _places(settings: Settings, nodes: list[dict[str, Any]]) -> Finding:
    """Return whether the nodes have the CPUs and GPUs of all replicas."""
    needed, per_node = settings.serving.replicas, settings.serving.replicas_per_node
    resources: list[dict[str, float]] = [node["Resources"] for node in nodes]
    gpus = settings.replica_gpus(sum(each.get("GPU", 0) for each in resources))
    if settings.target.device == "cuda" and not any(each.get("GPU") for each in resources):
        return Finding("nodes", "failure", "target.device is cuda, and no node of the cluster has a GPU")
    places = 0
    for each in resources:
        room = each.get("CPU", 0) if not gpus else min(each.get("CPU", 0), each.get("GPU", 0) / gpus)
        places += int(room if per_node is None else min(room, per_node))
    kinds = "CPU and GPU" if gpus else "CPU"
    says = f"{len(nodes)} nodes with room ({kinds}) for {places} replicas"
    if places < needed:
        return Finding("nodes", "warning", f"{says}, and serving.replicas is {needed}: the others wait for nodes")
    return Finding("nodes", "ok", says)


def _secret_files(settings: Settings) -> dict[str, str]:
    """Return the files with secrets that every node reads, by setting."""
    named = {f"serving.{name}_file": getattr(settings.serving, f"{name}_file") for name in KEYS}
    named |= {"serving.keys_file": settings.serving.keys_file, "redis.password_file": settings.redis.password_file}
    return {name: str(file) for name, file in named.items() if file is not None}


def _result(reference: Any) -> tuple[str, str] | None:
    """Return the result of ``look`` if it has arrived."""
    try:
        return ray.get(reference, timeout=0)
    except (GetTimeoutError, RayError):
        return None
