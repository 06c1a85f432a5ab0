"""Service over several nodes: two with replicas, two with training, and a head with neither."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from tests.clients import ClientThread, Service
from tests.cluster.nodes import Node, Nodes
from tests.pointers import put
from tests.waiting import wait_until

REPLICAS = WORKERS = 2
TRAINING = "role=training"
RANK, TRAINER = "RayTrainWorker", "DistributedTrainer"
RECOVERY_SECONDS = 180.0
DOMAIN = "general"
SETTINGS: dict[str, object] = {
    "target.source": "/data/tiny",
    "target.dtype": "float32",
    "engine.slots": 8,
    "engine.context": 1024,
    "engine.threads": 1,
    "drafter.kind": "eagle",
    "drafter.vocabulary": 128,
    "growth.kind": "chain",
    "growth.governed": False,  # drafts do not pay on such a small target
    "trainer.node_labels": [TRAINING],
    "trainer.min_records": 4,
    "trainer.steps_per_candidate": 15,
    "trainer.price": 0,  # train regardless of the gain
    "trainer.duty": 1,
    "trainer.tracking": "none",
}


@dataclass
class Cluster(Service):
    """Service on the nodes, called at the head's proxy."""

    nodes: Nodes

    @property
    def registry(self) -> Registry:
        return Registry(self.nodes.home / "registry")

    def deploy(self) -> None:
        """Deploy the service with the settings of the tests."""
        self.nodes.deploy(**SETTINGS)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        with Events(self.nodes.redis_url) as events:
            return [event for event in events.recent() if event["kind"] == kind]

    def publish(self) -> int:
        """Publish the newest weights again with small changes; return the version."""
        newest = self.registry.list(DOMAIN)[0].number
        version = self.registry.load(DOMAIN, newest)
        changed = {name: tensor + 0.05 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
                   for name, tensor in version.weights.items()}  # fmt: skip
        return self.registry.publish(DOMAIN, changed, version.config, {"parent": newest})

    def roll_out(self, number: int) -> float:
        """Point all replicas at a version; return the time of the move."""
        with Pointer(self.nodes.redis_url, self.nodes.home / "registry") as pointer:
            now = time.time()
            put(pointer, DOMAIN, Rollout(number, None, 0.0, now))
        return now

    def at(self, node: Node) -> Service:
        """Return the service at the proxy of a node."""
        return Service(self.port, headers=self.headers, host=node.ip)

    def serving(self) -> list[Node]:
        """Return the nodes for replicas."""
        return [node for node in self.nodes.joined if not node.labels]

    def training(self) -> list[Node]:
        """Return the nodes for training."""
        return [node for node in self.nodes.joined if node.labels]

    def ranks(self) -> dict[Node, list[int]]:
        """Return the training processes of each node."""
        ranks = {node: [process.pid for process in node.actors(RANK)] for node in self.nodes.all}
        return {node: pids for node, pids in ranks.items() if pids}

    def heal(self) -> None:
        """Restore the initial nodes, replicas and training processes."""
        while len(self.training()) < 2:
            self.nodes.join(0, TRAINING)
        for node in [node for node in self.serving() if node.machine.process.poll() is not None]:
            self.nodes.lose(node)
        while len(self.serving()) < REPLICAS:
            self.nodes.join(1)
        wait(lambda: len(self.nodes.replicas()) == REPLICAS and len(self.loads()) == REPLICAS)
        for node in set(self.serving()) - set(self.nodes.replicas().values()):
            self.nodes.lose(node)
        if len(self.ranks()) < WORKERS:
            for pid in [pid for pids in self.ranks().values() for pid in pids][:1]:
                os.kill(pid, signal.SIGKILL)  # Ray Train spreads a new group over the current nodes
        wait(lambda: len(self.ranks()) == WORKERS and not any(self.loads().values()))


wait = partial(wait_until, seconds=RECOVERY_SECONDS, every=0.1)


class Traffic:
    """Clients that request short completions one after the other and store all answers; ``prompts`` limits them."""

    def __init__(self, service: Service, clients: int, prompts: Iterator[str] | None = None, **fields: Any) -> None:
        self.clients: list[ClientThread] = []
        self._stop, self._service, self._lock = threading.Event(), service, threading.Lock()
        self._prompts = prompts or (f"prompt {number}" for number in count())
        self._fields = {"max_tokens": 8, **fields}
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if (prompt := next(self._prompts, None)) is None:
                    return
                client = ClientThread(self._service.url, self._service.headers, prompt=prompt, **self._fields)
                self.clients.append(client)
            client.join()
