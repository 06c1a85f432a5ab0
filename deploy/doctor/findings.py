"""Checks of packages, settings, hardware and services before a start."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from packaging.requirements import Requirement
from redis.exceptions import NoPermissionError, RedisError

from deploy.assembly import StartError
from deploy.contradictions import check_exposure, check_settings
from deploy.doctor.limit import CallTimeout, within
from deploy.doctor.self_test import SelfTestError, self_test
from deploy.embedded import check_port
from deploy.local_ray import check_token_mode
from deploy.vllm.environment import has_nvidia
from osd import files
from osd.capture.server import RedisSetupError, find_server, open_redis, public_url
from osd.capture.streams import StreamState, stream_states
from osd.config import ConfigError, Settings
from osd.redis_client import connect
from osd.running import find
from osd.runtime.device import pick_device
from osd.runtime.machine import Machine

_SHOWN = ("torch", "transformers", "ray", "redis")
"""Packages whose versions are always shown."""

_REDIS_SECONDS = 6.0

_LEAST_FREE = 2 << 30
"""Bytes of disk and memory below which a start probably fails."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, as a sentence.

    With a ``failure`` ``osd up`` does not start or gives wrong answers; with a ``warning`` it runs less well.
    """

    check: str
    state: Literal["ok", "warning", "failure"]
    says: str


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. Call it on the main thread, which the embedded Redis needs."""
    checks: dict[str, Callable[[Settings], Finding]] = {
        "packages": _packages,
        "settings": _settings,
        "CPU": _cpu,
        "GPU": _gpu,
        "memory": _memory,
        "disk": _disk,
        "Redis": redis_finding,
        "traces": _traces,
        "port": _port,
        "self-test": _self_test,
    }
    for name, check in checks.items():
        try:
            yield check(settings)
        except Exception as error:  # a failing check must not prevent the next
            yield Finding(name, "failure", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _packages(settings: Settings) -> Finding:
    wrong: list[str] = []
    for line in importlib.metadata.requires("osd-llm") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", "serve")
        ):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return Finding("packages", "failure", f"{', '.join(wrong)}; install osd-llm[serve] again")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("osd-llm", *_SHOWN)]
    return Finding("packages", "ok", ", ".join([*versions, f"Python {platform.python_version()}"]))


def _settings(settings: Settings) -> Finding:
    from deploy.preparation import check_rules

    try:
        check_exposure(settings)
        check_token_mode()
        check_settings(settings)
        check_rules(settings)
    except (ConfigError, StartError) as error:
        return Finding("settings", "failure", str(error))
    drafter, growth = settings.drafter.kind, settings.growth.kind
    return Finding("settings", "ok", f"target {settings.target.source}, drafter {drafter}, growth {growth}")


def _cpu(settings: Settings) -> Finding:
    here = Machine.here()
    if here.kernels == "PyTorch" and pick_device(settings.target.device).type == "cpu":
        reason = "our kernels do not run here, so PyTorch's slower operators do; they need AVX2 and a C compiler"
        return Finding("CPU", "warning", f"{here}; {reason} when osd is installed")
    return Finding("CPU", "ok", str(here))


def _gpu(settings: Settings) -> Finding:
    device, available = settings.target.device, torch.cuda.is_available()
    if settings.engine.kind == "vllm":  # it has a PyTorch of its own
        if device == "cuda" and not has_nvidia():
            return Finding("GPU", "failure", "target.device is cuda, and this machine has no GPU from NVIDIA")
        return Finding("GPU", "ok", "a GPU from NVIDIA" if has_nvidia() else "none; vLLM computes on the CPU")
    if device.startswith("cuda") and not available:
        return Finding("GPU", "failure", f"target.device is {device}, and torch {torch.__version__} sees no GPU")
    if not available:
        return Finding("GPU", "ok", "none; the target computes on the CPU")
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    named = ", ".join(f"{device.name} with {device.total_memory >> 20:,} MiB" for device in devices)
    return Finding("GPU", "ok", f"{named}; the target computes on {pick_device(device)}")


def _memory(settings: Settings) -> Finding:
    memory = psutil.virtual_memory()
    says = f"{memory.available >> 20:,} of {memory.total >> 20:,} MiB are available"
    return Finding("memory", "warning" if memory.available < _LEAST_FREE else "ok", says)


def _disk(settings: Settings) -> Finding:
    free: dict[Path, int] = {}
    for name, folder in (("home", settings.home_dir), ("cache", settings.cache_dir)):
        try:
            files.make_directory(folder)
            with tempfile.TemporaryFile(dir=folder):
                free[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            return Finding("disk", "failure", f"{name} {folder} cannot be written: {error.strerror}")
    says = ", ".join(f"{size >> 20:,} MiB are free in {folder}" for folder, size in free.items())
    return Finding("disk", "warning" if min(free.values()) < _LEAST_FREE else "ok", says)


def redis_finding(settings: Settings) -> Finding:
    """Return whether the Redis of the running service, or else of the settings, answers and keeps stored data."""
    running = find(settings.home_dir)
    if running is None:
        return configured_redis_finding(settings)
    try:
        return _query_redis(running.redis_url, "the running service's")
    except RedisError as error:
        return Finding("Redis", "failure", " ".join(str(error).split()))


def configured_redis_finding(settings: Settings) -> Finding:
    """Return whether the Redis of the settings answers and keeps stored data; start one if the settings have none."""
    try:
        if settings.redis_url:  # the lookup of its name has no limit of its own
            return within(_REDIS_SECONDS, _query_configured, settings)
        server = find_server()
        with open_redis(settings) as handle:
            return _query_redis(handle.url, f"started for this check from {server}")
    except (RedisSetupError, RedisError) as error:
        return Finding("Redis", "failure", " ".join(str(error).split()))
    except CallTimeout as error:
        address = public_url(settings.redis_url or "")
        return Finding("Redis", "failure", f"redis_url {address}: {error}: check its name and its port")


def _traces(settings: Settings) -> Finding:
    running = find(settings.home_dir)
    url = settings.redis_url if running is None else running.redis_url
    if url is None:
        return Finding("traces", "ok", "none: no service runs here, and Redis starts with the service")
    try:
        with connect(url, timeout=2.0) as client:
            states = stream_states(client, settings.capture.stream)
    except RedisError as error:
        return Finding("traces", "warning", f"the streams cannot be read: {' '.join(str(error).split())}")
    if not states:
        return Finding("traces", "ok", "none has been captured yet")
    says = "; ".join(f"{domain}: {_describe(state)}" for domain, state in states.items())
    full = sum(state.records for state in states.values()) >= settings.capture.max_records
    behind = [
        domain for domain, state in states.items() if state.waiting and state.waiting.records >= state.records > 0
    ]
    if full and behind:
        warning = f"records of {', '.join(behind)} are dropped before training: raise capture.max_records"
        return Finding("traces", "warning", f"{says}; {warning}")
    return Finding("traces", "ok", says)


def _describe(state: StreamState) -> str:
    size = f"{state.records:,} records, {state.bytes / (1 << 20):,.1f} MiB"
    if state.waiting is None:
        return f"{size}, no trainer reads them"
    if not state.waiting.records:
        return f"{size}, none waits for the trainer"
    age = "" if state.waiting.age is None else f", the oldest for {state.waiting.age:,.0f} s"
    return f"{size}, {state.waiting.records:,} wait for the trainer{age}"


def _query_configured(settings: Settings) -> Finding:
    with open_redis(settings) as handle:
        return _query_redis(handle.url, "redis_url's")


def _query_redis(url: str, owner: str) -> Finding:
    with connect(url, timeout=2.0) as client:
        client.ping()
        begun = time.perf_counter()
        client.ping()
        took = time.perf_counter() - begun
        try:
            about: Any = client.info()
        except NoPermissionError:
            says = f"{owner}; it answers in {took * 1e3:.1f} ms, and its user may not read version and maxmemory-policy"
            return Finding("Redis", "ok", says)
    policy = about.get("maxmemory_policy", "unknown")
    says = f"version {about['redis_version']}, {owner}; it answers in {took * 1e3:.1f} ms"
    if policy != "noeviction":
        warning = "records may be evicted before they are read: set maxmemory-policy noeviction"
        return Finding("Redis", "warning", f"{says}; its maxmemory-policy is {policy}, so {warning}")
    return Finding("Redis", "ok", says)


def _port(settings: Settings) -> Finding:
    running = find(settings.home_dir)
    if running is not None:
        return Finding("port", "ok", f"osd runs in {settings.home_dir} and answers at {running.url}")
    host, port = settings.serving.host, settings.serving.port
    try:
        check_port(host, port)
    except StartError as error:
        return Finding("port", "failure", str(error))
    return Finding("port", "ok", f"{port} is free on {host}")


def _self_test(settings: Settings) -> Finding:
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = self_test(settings, Path(directory))
        except SelfTestError as error:
            return Finding("self-test", "failure", str(error))
    return Finding("self-test", "ok", done)
