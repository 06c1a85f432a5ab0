"""What is installed here, what this machine can do, and what is in the way of a start."""

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
from redis.exceptions import RedisError as RedisFailure

from deploy.assembly import StartError
from deploy.contradictions import check_settings
from deploy.doctor.self_test import SelfTestError, self_test
from deploy.embedded import check_port
from osd.capture.server import RedisError, find_server, open_redis
from osd.capture.streams import StreamState, look
from osd.config import ConfigError, Settings
from osd.redis_client import connect
from osd.running import find
from osd.runtime.device import pick_device
from osd.runtime.machine import Machine

_SHOWN = ("torch", "transformers", "ray", "redis")
"""Packages whose versions are told even where nothing is wrong with them."""

_LEAST_FREE = 2 << 30
"""Bytes of the disk and of the memory below which a start is likely to end in an error."""


@dataclass(frozen=True)
class Finding:
    """What a check saw, in a sentence.

    A ``failure`` keeps ``osd up`` from starting or from answering rightly; with a ``warning`` it runs, not as well.
    """

    check: str
    state: Literal["ok", "warning", "failure"]
    says: str


def findings(settings: Settings) -> Iterator[Finding]:
    """Each finding, as soon as there is one. Must run on the main thread, as the embedded Redis must."""
    checks: dict[str, Callable[[Settings], Finding]] = {
        "packages": _packages,
        "settings": _settings,
        "CPU": _cpu,
        "GPU": _gpu,
        "memory": _memory,
        "disk": _disk,
        "Redis": _redis,
        "traces": _traces,
        "port": _port,
        "self-test": _self_test,
    }
    for name, check in checks.items():
        try:
            yield check(settings)
        except Exception as error:  # what one check cannot do is no reason to leave out the others
            yield Finding(name, "failure", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _packages(settings: Settings) -> Finding:
    wrong: list[str] = []
    for line in importlib.metadata.requires("osd") or ():
        asked = Requirement(line)
        if asked.marker is not None and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", "serve")):
            continue
        try:
            version = importlib.metadata.version(asked.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{asked.name} is not installed")
            continue
        if not asked.specifier.contains(version, prereleases=True):
            wrong.append(f"{asked.name} {version} is not {asked.specifier}")
    if wrong:
        return Finding("packages", "failure", f"{', '.join(wrong)}; install osd[serve] again")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("osd", *_SHOWN)]
    return Finding("packages", "ok", ", ".join([*versions, f"Python {platform.python_version()}"]))


def _settings(settings: Settings) -> Finding:
    from deploy.preparation import check_rules

    try:
        check_settings(settings)
        check_rules(settings)
    except ConfigError as error:
        return Finding("settings", "failure", str(error))
    drafter, growth = settings.drafter.kind, settings.growth.kind
    return Finding("settings", "ok", f"target {settings.target.source}, drafter {drafter}, growth {growth}")


def _cpu(settings: Settings) -> Finding:
    here = Machine.here()
    if here.kernels == "PyTorch" and pick_device(settings.target.device).type == "cpu":
        told = "no kernels of ours run here, so that PyTorch's slower operators do; they need AVX2 and a C compiler"
        return Finding("CPU", "warning", f"{here}; {told} when osd is installed")
    return Finding("CPU", "ok", str(here))


def _gpu(settings: Settings) -> Finding:
    wanted, there = settings.target.device, torch.cuda.is_available()
    if wanted.startswith("cuda") and not there:
        return Finding("GPU", "failure", f"target.device is {wanted}, and torch {torch.__version__} sees no GPU")
    if not there:
        return Finding("GPU", "ok", "none; the target computes on the CPU")
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    named = ", ".join(f"{one.name} with {one.total_memory >> 20:,} MiB" for one in devices)
    return Finding("GPU", "ok", f"{named}; the target computes on {pick_device(wanted)}")


def _memory(settings: Settings) -> Finding:
    memory = psutil.virtual_memory()
    says = f"{memory.available >> 20:,} of {memory.total >> 20:,} MiB are available"
    return Finding("memory", "warning" if memory.available < _LEAST_FREE else "ok", says)


def _disk(settings: Settings) -> Finding:
    home = settings.home_dir
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            free = shutil.disk_usage(home).free
    except OSError as error:
        return Finding("disk", "failure", f"home {home} cannot be written: {error.strerror}")
    says = f"{free >> 20:,} MiB are free in {home}"
    return Finding("disk", "warning" if free < _LEAST_FREE else "ok", says)


def _redis(settings: Settings) -> Finding:
    running = find(settings.home_dir)
    try:
        if running is not None:
            return _asked(running.redis_url, "the running service's")
        own = None if settings.redis_url else find_server()
        with open_redis(settings) as handle:
            return _asked(handle.url, "redis_url's" if own is None else f"started for this from {own}")
    except (RedisError, RedisFailure) as error:
        return Finding("Redis", "failure", " ".join(str(error).split()))


def _traces(settings: Settings) -> Finding:
    running = find(settings.home_dir)
    url = settings.redis_url if running is None else running.redis_url
    if url is None:
        return Finding("traces", "ok", "none: nothing runs here, and Redis is started with the service")
    try:
        with connect(url, timeout=2.0) as client:
            states = look(client, settings.capture.stream)
    except RedisFailure as error:
        return Finding("traces", "warning", f"what waits cannot be told: {' '.join(str(error).split())}")
    if not states:
        return Finding("traces", "ok", "none has been captured yet")
    says = "; ".join(f"{domain}: {_told(state)}" for domain, state in states.items())
    full = sum(state.records for state in states.values()) >= settings.capture.max_records
    behind = [domain for domain, one in states.items() if one.waiting and one.waiting.records >= one.records > 0]
    if full and behind:
        told = f"records of {', '.join(behind)} leave before they are learnt from: raise capture.max_records"
        return Finding("traces", "warning", f"{says}; {told}")
    return Finding("traces", "ok", says)


def _told(state: StreamState) -> str:
    held = f"{state.records:,} records, {state.bytes / (1 << 20):,.1f} MiB"
    if state.waiting is None:
        return f"{held}, no trainer reads them"
    if not state.waiting.records:
        return f"{held}, none waits for the trainer"
    age = "" if state.waiting.age is None else f", the oldest for {state.waiting.age:,.0f} s"
    return f"{held}, {state.waiting.records:,} wait for the trainer{age}"


def _asked(url: str, whose: str) -> Finding:
    with connect(url, timeout=2.0) as client:
        client.ping()
        begun = time.perf_counter()
        client.ping()
        took = time.perf_counter() - begun
        about: Any = client.info()
    policy = about.get("maxmemory_policy", "unknown")
    says = f"version {about['redis_version']}, {whose}; it answers in {took * 1e3:.1f} ms"
    if policy != "noeviction":
        told = "records may vanish before they are read: set maxmemory-policy noeviction"
        return Finding("Redis", "warning", f"{says}; its maxmemory-policy is {policy}, so that {told}")
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
