"""Checks of a Ray cluster before a deployment, for ``osd doctor --cluster FILE`` and ``osd deploy FILE``."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from redis.exceptions import RedisError

from deploy.cluster import checked_settings
from deploy.deployment import ClusterError, Head, read_deployment, read_token
from deploy.doctor.findings import Finding, configured_redis_finding
from deploy.doctor.limit import CallTimeout, within
from deploy.doctor.node import NodeProbe, NodeReport, folder_of, key_of, look, versions
from deploy.local_ray import last_line
from osd import files
from osd.capture.server import public_url
from osd.config import ConfigError, Settings
from osd.config.secrets import KEYS
from osd.redis_client import connect
from osd.sealed import SealedSettings, seal

_ALL_SECONDS, _HOME_SECONDS, _NODES_SECONDS, _END_SECONDS = 25.0, 4.0, 20.0, 3.0
"""Limits of all checks, of a look at home here, of the checks on all nodes, and of leaving the cluster."""

_KEY_SECONDS = 120
_SAME_IMAGE = "use one image on all nodes"


def cluster_findings(file: Path) -> Iterator[Finding]:
    """Yield each finding on the cluster for a deployment file; a failure that hides others is the last finding."""
    end = time.monotonic() + _ALL_SECONDS
    try:
        settings = checked_settings(read_deployment(file).args)
    except ConfigError as error:
        yield Finding("deployment", "failure", str(error))
        return
    yield Finding("deployment", "ok", f"{file}: target {settings.target.source}, {settings.serving.replicas} replicas")
    try:
        head = Head(read_token())
        version = head.ray_version()
        if version != ray.__version__:
            says = f"the cluster runs Ray {version}, and here is Ray {ray.__version__}: {_SAME_IMAGE}"
            yield Finding("Ray", "failure", says)
            return
        yield Finding("Ray", "ok", f"version {version}")
        yield _token_finding(head)
    except ClusterError as error:
        yield Finding("Ray", "failure", str(error))
        return
    redis = configured_redis_finding(settings)
    yield redis
    yield from _node_findings(settings, redis.state != "failure", end)


def judge(reports: Mapping[str, NodeReport | str], settings: Settings) -> Iterator[Finding]:
    """Yield the findings that follow from the reports of all nodes.

    Args:
        reports: the report of each node, or the reason why it has none, by the address of the node.
        settings: settings of the deployment.
    """
    present = {address: report for address, report in reports.items() if isinstance(report, NodeReport)}
    absent = {address: report for address, report in reports.items() if isinstance(report, str)}
    for reason, nodes in _by_reason(absent):
        yield Finding("nodes", "failure", f"{nodes}: {reason}")
    others = {address: _difference(report) for address, report in present.items()}
    for reason, nodes in _by_reason(others):
        yield Finding("versions", "failure", f"on {nodes}: {reason}: {_SAME_IMAGE}")
    if not any(others.values()):
        named = ", ".join(f"{name} {version}" for name, version in versions().items())
        yield Finding("versions", "ok", f"{named} on {len(present)} nodes")
    yield from _home_findings(present, settings)
    for check, name in (("secrets", "secrets"), ("Redis", "redis"), ("vLLM", "engine")):
        for reason, nodes in _by_reason({address: getattr(report, name) for address, report in present.items()}):
            yield Finding(check, "failure", f"on {nodes}: {reason}")


def ask_nodes(nodes: Sequence[Mapping[str, Any]], probe: NodeProbe, seconds: float) -> dict[str, NodeReport | str]:
    """Let each node look, and return the reports for ``judge``; Ray must be initialised.

    Args:
        nodes: the nodes, as ``ray.nodes`` returns them.
        probe: the checks; this node has the folder of the probe.
        seconds: limit for all nodes together.
    """
    remote = ray.remote(num_cpus=0, max_retries=0)(look)
    tasks: dict[Any, Mapping[str, Any]] = {}
    for node in nodes:
        here = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        tasks[here.remote(probe, node["NodeID"], node["Resources"].get("CPU", 0) >= 1)] = node
    ray.wait(list(tasks), num_returns=len(tasks), timeout=seconds)
    folder = folder_of(probe.home, probe.token)
    return {node["NodeManagerAddress"]: _report(task, seconds, folder / node["NodeID"]) for task, node in tasks.items()}


def _token_finding(head: Head) -> Finding:
    if head.requires_token():
        return Finding("token", "ok", "Ray's servers require it")
    says = f"Ray's head at {head.url} also answers without a token, so everybody who reaches it could run code in osd"
    return Finding("token", "failure", f"{says}: set RAY_AUTH_MODE=token on all nodes, and start Ray again")


class ProbeError(Exception):
    """Error of a probe that cannot be prepared.

    Attributes:
        finding: the reason.
    """

    def __init__(self, check: str, says: str) -> None:
        super().__init__(says)
        self.finding = Finding(check, "failure", says)


@contextlib.contextmanager
def probing(settings: Settings, asks_redis: bool) -> Generator[NodeProbe]:
    """Yield the probe of a deployment, with a folder in ``home`` and a key in Redis that exist until the end.

    Args:
        settings: settings of the deployment.
        asks_redis: whether the nodes ask Redis.

    Raises:
        ProbeError: ``home`` or Redis cannot be written here.
    """
    home, token = settings.home_dir, secrets.token_hex(16)
    try:
        sealed = within(_HOME_SECONDS, _make_folder, settings, token)
    except OSError as error:
        raise ProbeError("home", f"home {home} cannot be written: {error.strerror}") from None
    except CallTimeout as error:
        raise ProbeError("home", f"home {home} gives {error}: check its mount") from None
    python = settings.engine.vllm.python if settings.engine.kind == "vllm" else None
    try:
        if asks_redis:
            _set_key(settings, token)
        yield NodeProbe(home, token, _secret_files(settings), sealed if asks_redis else None, python)
    finally:
        with contextlib.suppress(CallTimeout):
            within(_HOME_SECONDS, shutil.rmtree, folder_of(home, token), True)
        if asks_redis:
            _delete_key(settings, token)


def _node_findings(settings: Settings, asks_redis: bool, end: float) -> Iterator[Finding]:
    """Yield the findings that processes on the nodes make, until the time ``end`` of the monotonic clock."""
    try:
        with probing(settings, asks_redis) as probe:
            try:
                nodes = within(_left(end), _join)
                reports = ask_nodes(nodes, probe, min(_NODES_SECONDS, _left(end)))
            finally:
                with contextlib.suppress(CallTimeout):
                    within(_END_SECONDS, ray.shutdown)
    except ProbeError as error:
        yield error.finding
        return
    except (CallTimeout, RayError, ConnectionError, RuntimeError, ValueError) as error:
        yield Finding("nodes", "failure", _ray_problem(error))
        return
    yield places_finding(settings, nodes)
    yield from judge(reports, settings)


def _ray_problem(error: Exception) -> str:
    says = " ".join(str(error).split())[:300]
    if "Version mismatch" in says:
        return f"this node and the cluster have different versions of Ray or Python: {_SAME_IMAGE} ({says})"
    return f"Ray of this node does not answer: {says}"


def _left(end: float) -> float:
    return max(end - time.monotonic(), 1.0)


def _make_folder(settings: Settings, token: str) -> SealedSettings:
    """Make the folder of a probe, and return the settings with their secrets in that folder.

    Raises:
        OSError: ``home`` cannot be written.
    """
    folder = folder_of(settings.home_dir, token)
    files.make_directory(folder)
    # The file with the secrets of a running service, which is in home itself, must stay as it is.
    return seal(settings.model_copy(update={"home": folder}), settings.redis_url or "")


def _set_key(settings: Settings, token: str) -> None:
    url = settings.redis_url or ""
    try:
        with connect(url, timeout=2.0) as client:
            client.set(key_of(token), token, ex=_KEY_SECONDS)
    except RedisError as error:
        reason = " ".join(str(error).split())
        raise ProbeError("Redis", f"redis_url {public_url(url)} cannot be written: {reason}") from None


def _delete_key(settings: Settings, token: str) -> None:
    with contextlib.suppress(RedisError), connect(settings.redis_url or "", timeout=2.0) as client:
        client.delete(key_of(token))


def _join() -> list[dict[str, Any]]:
    """Connect to the cluster of this node, and return its living nodes."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    ray.init(address, logging_level=logging.ERROR, log_to_driver=False, namespace="osd")
    return [node for node in ray.nodes() if node["Alive"]]


def _report(task: Any, seconds: float, written: Path) -> NodeReport | str:
    """Return the report of a node, or the reason why it has none.

    Args:
        task: the task on the node.
        seconds: the time that it had.
        written: the file that the node writes, if it shares ``home`` with this node.
    """
    try:
        report: NodeReport = ray.get(task, timeout=0)
    except GetTimeoutError:
        return f"no answer within {seconds:.0f} seconds; check that RAY_AUTH_TOKEN_PATH can be read there"
    except RayError as error:
        return f"the check fails there ({last_line(error)[:200]}): {_SAME_IMAGE}"
    return replace(report, shares_home=report.shares_home and written.exists())


def _difference(report: NodeReport) -> str:
    """Return the first version in which a node differs from this node, "" if all are equal."""
    for name, here in versions().items():
        if (there := report.versions.get(name)) != here:
            return f"{name} {there}, and here {name} {here}"
    return ""


def _home_findings(reports: Mapping[str, NodeReport], settings: Settings) -> Iterator[Finding]:
    home = settings.home_dir
    for reason, nodes in _by_reason({address: report.home for address, report in reports.items()}):
        says = f"home {home} of {nodes} {reason}; check the mount of the folder and its owner"
        yield Finding("home", "failure", says)
    usable = {address: report for address, report in reports.items() if not report.home}
    unshared = sorted(address for address, report in usable.items() if not report.shares_home)
    if unshared:
        says = f"home {home} of {', '.join(unshared)} is not the folder of this node: mount one folder on all nodes"
        yield Finding("home", "failure" if settings.registry.url is None else "warning", says)
    elif len(usable) == len(reports):
        yield Finding("home", "ok", f"{home} is the same folder on {len(reports)} nodes")


def _by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reason with the addresses of its nodes; nodes without a reason are left out."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for address, reason in sorted(reasons.items()):
        if reason:
            nodes[reason].append(address)
    for reason, addresses in nodes.items():
        yield reason, ", ".join(addresses)


def places_finding(settings: Settings, nodes: list[dict[str, Any]]) -> Finding:
    """Return whether the nodes have the CPUs and GPUs of all replicas."""
    needed, per_node = settings.serving.replicas, settings.serving.replicas_per_node
    resources: list[dict[str, float]] = [node["Resources"] for node in nodes]
    gpus_of = [each.get("GPU", 0) for each in resources]
    for name, device in (("target", settings.target.device), ("trainer", settings.trainer.device)):
        if device == "cuda" and not any(gpus_of):
            return Finding("nodes", "failure", f"{name}.device is cuda, and no node of the cluster has a GPU")
    gpus, most = settings.replica_gpus(sum(gpus_of)), max(gpus_of, default=0)
    if gpus > most:
        says = f"target.tensor_parallel is {settings.target.tensor_parallel}, and no node has more than {most:g} GPUs"
        return Finding("nodes", "failure", says)
    places = 0
    for each in resources:
        room = each.get("CPU", 0) if not gpus else min(each.get("CPU", 0), each.get("GPU", 0) / gpus)
        places += int(room if per_node is None else min(room, per_node))
    kinds = "CPU and GPU" if gpus else "CPU"
    says = f"{len(nodes)} nodes with room ({kinds}) for {places} replica{'s' * (places != 1)}"
    if places < needed:
        return Finding("nodes", "warning", f"{says}, and serving.replicas is {needed}: the others wait for nodes")
    return Finding("nodes", "ok", says)


def _secret_files(settings: Settings) -> dict[str, str]:
    """Return the files with secrets that every node reads, by setting."""
    named = {f"serving.{name}_file": getattr(settings.serving, f"{name}_file") for name in KEYS}
    named |= {"serving.keys_file": settings.serving.keys_file, "redis.password_file": settings.redis.password_file}
    return {name: str(file) for name, file in named.items() if file is not None}
