"""Versions to many: how soon every client on every node has a new one, and what store and Redis bear meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Empty
from typing import Any
from unittest import mock

import redis
import torch
from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.pulls_processes import KEPT, Told, counter, node, store
from benchmarks.report import columns
from osd.capture.server import RedisServer, free_port
from osd.registry.object_storage import ObjectStorage
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.retention import retire
from osd.registry.versions import Registry

_DOMAIN, _BUCKET = "general", "drafters"
_ACCESS = {"AWS_ACCESS_KEY_ID": "osd", "AWS_SECRET_ACCESS_KEY": "osd", "AWS_DEFAULT_REGION": "us-east-1"}
_START_SECONDS, _LONGEST_SECONDS = 60.0, 120.0
_STEP = 0.01  # by which part of itself a weight moves from one version to the next


@dataclass(frozen=True)
class Plan:
    """``nodes`` of ``clients`` each follow ``versions`` of ``megabytes``; at most ``pulls`` nodes read at a time."""

    nodes: int
    clients: int
    versions: int
    megabytes: float
    pulls: int


@dataclass(frozen=True)
class Pulled:
    """A version: seconds until the last client had it, copies that the store sent to a node, Redis's part of a core."""

    number: int
    seconds: float
    copies: float
    redis: float


def measure(plan: Plan, report: Callable[[str], None] = lambda step: None) -> Iterator[Pulled]:
    """Publish one version after the other, each when everybody has the one before.

    Raises:
        RuntimeError: there is no store to start, or a client has something else than what was published.
    """
    context = multiprocessing.get_context("spawn")
    sent, told = counter(), context.Queue()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(256))
        stack.enter_context(_object_store(sent))
        registry = Registry(ObjectStorage(f"s3://{_BUCKET}/registry", home / "trainer", KEPT))
        pointer = stack.enter_context(Pointer(server.url, registry.storage))
        client = stack.enter_context(redis.Redis.from_url(server.url))
        for number in range(plan.nodes):
            given = (f"s3://{_BUCKET}/registry", str(home / f"node-{number}"), server.url)
            stack.enter_context(_running(node, *given, _DOMAIN, plan.clients, plan.pulls, told))
        weights = torch.randn(int(plan.megabytes * 1e6) // 4, generator=torch.Generator().manual_seed(0)) * 0.02
        size, rollout = weights.numel() * 4, None
        for number in range(1, plan.versions + 1):
            report(f"version {number} of {plan.versions}")
            weights = weights * (1 + _STEP * torch.randn(weights.shape))
            published = registry.publish(_DOMAIN, {"weights": weights}, {"kind": "eagle"}, {})
            before, began, taken = sent.value, time.time(), spent(client)
            moved = Rollout(published, None, 0.0, began)
            if not pointer.replace(_DOMAIN, rollout, moved):
                raise RuntimeError("somebody else moved the pointer")
            rollout = pointer.get(_DOMAIN)
            last = _await(told, published, plan.nodes * plan.clients)
            elapsed = time.time() - began
            copies = (sent.value - before) / plan.nodes / size
            yield Pulled(published, last - began, copies, (spent(client) - taken) / elapsed)
            retire(registry, _DOMAIN, 3, PointerFiles(registry.storage).locked(_DOMAIN))


def table(plan: Plan, pulled: Sequence[Pulled]) -> Grid:
    """The first version, while the nodes start and have nothing of it, and those after it."""
    grid = columns("versions", "seconds until all have it", "copies a node", "Redis, of a core")
    for name, some in (("first, with the start", pulled[:1]), ("others", pulled[1:])):
        if some:
            seconds, copies, load = (
                Spread.of([getattr(one, field) for one in some]) for field in ("seconds", "copies", "redis")
            )
            grid.add_row(name, seconds.text(), copies.text(), load.text(digits=3))
    grid.title = f"{plan.nodes} nodes of {plan.clients} clients, {plan.megabytes:g} MB"
    return grid


def _await(told: Any, number: int, clients: int) -> float:
    """When the last of the clients had a version."""
    last, deadline = 0.0, time.monotonic() + _LONGEST_SECONDS
    while clients:
        try:
            message: Told | str = told.get(timeout=max(deadline - time.monotonic(), 0.01))
        except Empty:
            raise RuntimeError(f"{clients} clients have not got version {number} in {_LONGEST_SECONDS:g} s") from None
        if isinstance(message, str):
            raise RuntimeError(message)
        if message[0] == number:
            clients, last = clients - 1, max(last, message[1])
    return last


def spent(client: redis.Redis) -> float:
    """CPU seconds that Redis took so far."""
    found: Any = client.info("cpu")
    return found["used_cpu_user"] + found["used_cpu_sys"]


@contextmanager
def _object_store(sent: Any) -> Generator[None]:
    """One on loopback, to which the environment leads."""
    if not (find_spec("moto") and find_spec("s3fs")):
        raise RuntimeError("needs packages that are not installed: pip install 'osd[dev]'")
    import s3fs
    from botocore.exceptions import BotoCoreError

    port = free_port()
    with (
        mock.patch.dict(os.environ, {**_ACCESS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}),
        _running(store, port, sent),
    ):
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                s3fs.S3FileSystem(use_listings_cache=False).mkdir(_BUCKET)
                break
            except (OSError, BotoCoreError):
                if time.monotonic() > deadline:
                    raise RuntimeError("the object store does not start") from None
                time.sleep(0.2)
        yield


@contextmanager
def _running(run: Callable[..., None], *given: Any) -> Generator[None]:
    """A process that is ended behind it."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=given, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(10)
