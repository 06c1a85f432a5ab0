"""Service of the end-to-end tests, with a real Redis, Ray Serve, and an engine on a tiny target."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2 as httpx
import pytest
import ray
import redis
import torch
from playwright.sync_api import Browser, sync_playwright
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deploy.local_ray import SERVE_ENVIRONMENT
from deploy.preparation import ensure_version
from osd.capture.server import RedisServer
from osd.config import Settings
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from serving.app import build
from tests.pointers import put
from tests.redis_servers import free_port
from tests.tiny import make_tiny
from tests.waiting import wait_until

BROWSER = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Options of a browser on a machine without a screen."""

REPLICAS = 2
ADMIN_KEY = "sk-operators"


@dataclass
class Service:
    """Running service, with helpers for tests."""

    settings: Settings
    redis: RedisServer
    handle: Any
    url: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def registry(self) -> Registry:
        return Registry(self.settings.registry_dir)

    def point_at(
        self, number: int, canary: int | None = None, share: float = 0.0, domain: str | None = None
    ) -> Rollout:
        rollout = Rollout(number, canary, share, time.time())
        with Pointer(self.redis.url, self.settings.registry_dir) as pointer:
            put(pointer, domain or self.settings.domain, rollout)
        return rollout

    def delete_pointer(self, domain: str) -> None:
        """Delete a domain's pointer and wait until every replica has dropped its drafters."""
        (self.settings.registry_dir / f"{domain}.rollout.json").unlink()
        with redis.Redis.from_url(self.redis.url) as client:

            def is_gone() -> bool:
                client.delete(f"osd:rollout:{domain}")  # again: a replica may have read the file just before
                return not any(domain in replica["others"] for replica in self.data()["replicas"])

            wait_until(is_gone, every=0.05)

    def data(self) -> dict[str, Any]:
        return self.http.get("/dashboard/data").raise_for_status().json()

    def versions(self) -> list[int]:
        """Return the drafter version of each replica."""
        return [replica["version"] for replica in self.data()["replicas"]]

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels."""
        text = self.http.get("/metrics").raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def complete(self, prompt: str = "hello", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def publish(
        self, change: Callable[[dict[str, Any]], None] = lambda weights: None, domain: str | None = None
    ) -> int:
        """Publish a version with the weights of the newest version, after ``change``; return its number."""
        newest = self.registry.list(self.settings.domain)[0].number
        version = self.registry.load(self.settings.domain, newest)
        weights = {name: tensor.clone() for name, tensor in version.weights.items()}
        change(weights)
        gate = {
            "acceptance": 0.61,
            "baseline_acceptance": 0.52,
            "expected_length": 2.4,
            "baseline_expected_length": 2.1,
        }
        trained = {"records": 321, "tokens": 9999, "steps": 150}
        manifest = {"parent": newest, "trained_on": trained, "gate": gate}
        return self.registry.publish(domain or self.settings.domain, weights, version.config, manifest)


def shake(weights: dict[str, torch.Tensor]) -> None:
    """Change the weights of a drafter, so that it drafts other tokens."""
    torch.manual_seed(1)
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor += 0.05 * torch.randn_like(tensor)


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER)
        yield browser
        browser.close()


@contextmanager
def running(folder: Path, serving: Mapping[str, Any] = MappingProxyType({}), **drafter: Any) -> Iterator[Service]:
    """Run a service in ``folder``; ``serving`` and ``drafter`` add settings of these sections."""
    target = make_tiny(folder / "tiny")
    settings = Settings(
        home=folder / "home",
        target={"source": str(target), "dtype": "float32"},
        engine={"slots": 4, "context": 1024, "threads": 1},
        drafter={"trained": {"vocabulary": 128}, **drafter},
        growth={"governed": False},  # drafts do not pay on a tiny target
        serving={
            "port": free_port(),
            "replicas": REPLICAS,
            "max_queue": 6,
            "body_timeout_s": 2,
            "admin_key": ADMIN_KEY,
            "otlp_endpoint": f"http://127.0.0.1:{free_port()}",  # only one test starts a collector here
            **serving,
        },
        log={"format": "json", "file": folder / "log.jsonl"},
    )
    os.environ.update(OTEL_BSP_SCHEDULE_DELAY="100", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ.update(SERVE_ENVIRONMENT)
    with RedisServer(max_memory_mb=128) as redis:
        ensure_version(settings, redis.url, target)
        try:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100 << 20,
                namespace="osd-tests",
                logging_level=logging.ERROR,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
                # With Ray's low default priority, workers on a busy machine take a minute to start.
                _system_config={"worker_niceness": 0},
            )
            serve.start(http_options={"host": "127.0.0.1", "port": settings.serving.port})
            handle = serve.run(build(settings, redis.url), name="osd", route_prefix="/")
            running = Service(settings, redis, handle, f"http://127.0.0.1:{settings.serving.port}")
            yield running
            running.http.close()
        finally:
            serve.shutdown()
            ray.shutdown()
