"""Ray cluster on machines made of namespaces, started from ``ray_cluster.yaml`` and the files in ``deploy/``.

Machines stand for the containers of ``ray up``: ``Nodes._start`` has the differences, which are the first process, the
file that ``ray up`` writes for its autoscaler, and the address of Ray's dashboard. Of ``deploy/serve.yaml`` a test
changes settings only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yaml

from osd.capture.server import find_server
from tests.cluster.machines import Machine, Network, network
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_SECONDS, DEPLOY_SECONDS = 120.0, 300.0
PASSWORD, TOKEN, KEY = (secrets.token_hex(16) for _ in range(3))
HEADERS = {"authorization": f"Bearer {KEY}"}
REDIS, HEAD = "192.0.2.5", "192.0.2.10"
PORT = 8000


@dataclass(eq=False)
class Node:
    """One node.

    Attributes:
        machine: its machine, whose first process is ``ray start --block``.
        labels: its labels.
    """

    machine: Machine
    labels: str

    @property
    def ip(self) -> str:
        return self.machine.ip

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return the processes of an actor class."""
        processes = []
        for process in self.machine.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if re.match(rf"ray::\w*{kind}\b", " ".join(process.cmdline())):  # empty for an ended process
                    processes.append(process)
        return processes


@dataclass
class Nodes:
    """Head without CPUs, and the nodes that ``joined`` it."""

    network: Network
    home: Path
    head: Node = field(init=False)
    redis: Machine = field(init=False)
    joined: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cluster = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
        self._count = 0

    def start(self) -> None:
        """Start Redis and the head, and wait until it answers."""
        self.start_redis()
        self.head = self._start("head", "--dashboard-host=0.0.0.0")
        self._wait(START_SECONDS, lambda: self.head.ip in self.living(), "the head", self.head)

    def start_redis(self) -> None:
        """Write all secrets and start Redis."""
        files = {"ray-token": TOKEN, "api-key": KEY, "redis-password": PASSWORD, "ray-redis-password": PASSWORD}
        for name, content in files.items():
            (self.home / name).write_text(content)
        self.network.names |= {"redis": REDIS, "ray-redis": REDIS}
        options = ("--bind", REDIS, "--requirepass", PASSWORD, "--save", "", "--maxmemory-policy", "noeviction")
        self.redis = self.network.boot("redis", REDIS, (str(find_server()), *options, "--dir", "/tmp"))

    @property
    def redis_url(self) -> str:
        return f"redis://:{PASSWORD}@{REDIS}:6379/0"

    @property
    def all(self) -> list[Node]:
        return [self.head, *self.joined]

    def join(self, cpus: int, labels: str = "") -> Node:
        """Start another node and wait until the head knows it."""
        node = self._start("worker", f"--num-cpus={cpus}" + f" --labels={labels}" * bool(labels), labels)
        self.joined.append(node)
        self._wait(START_SECONDS, lambda: node.ip in self.living(), f"node {node.ip}", node)
        return node

    def lose(self, node: Node) -> None:
        """Kill a node like a failed machine: no process announces its end."""
        node.machine.kill()
        self.joined.remove(node)

    def living(self) -> list[str]:
        """Return the addresses of the nodes that the head considers alive."""
        with contextlib.suppress(httpx2.HTTPError):
            answer = self._ask("/nodes?view=summary")
            if answer.status_code == 200:
                summary = answer.json()["data"]["summary"]
                return [node["raylet"]["nodeManagerAddress"] for node in summary if node["raylet"]["state"] == "ALIVE"]
        return []

    def replicas(self) -> dict[str, Node]:
        """Return the node of each running Serve replica, by the replica's name."""
        applications = self._ask("/api/serve/applications/").raise_for_status().json()["applications"]
        deployments = applications.get("osd", {"deployments": {}})["deployments"]
        replicas = [replica for deployment in deployments.values() for replica in deployment["replicas"]]
        running = [replica for replica in replicas if replica["state"] == "RUNNING"]
        nodes = {node.ip: node for node in self.joined}
        return {replica["replica_id"]: nodes[replica["node_ip"]] for replica in running if replica["node_ip"] in nodes}

    def deploy(self, **settings: object) -> None:
        """Deploy ``deploy/serve.yaml`` on the head, with ``settings`` over those of the file, and wait for replicas."""
        config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        (application,) = config["applications"]
        application["args"] |= settings
        (self.home / "serve.yaml").write_text(yaml.safe_dump(config))
        done = self.on(self.head, "osd", "deploy", "/data/serve.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    def on(self, node: Node, *command: object) -> Any:
        """Run a command on a node, in the environment of its container, and return its result."""
        return node.machine.run(*command, environment=self.environment())

    def _start(self, kind: str, options: str, labels: str = "") -> Node:
        ip = f"{HEAD.rpartition('.')[0]}.{10 + self._count}"
        command = self._cluster[f"{kind}_start_ray_commands"][-1]
        command = command.replace("--autoscaling-config=~/ray_bootstrap_config.yaml", "")
        line = f"exec env {command} {options} --block --disable-usage-stats"
        environment = {**self.environment(), "RAY_HEAD_IP": HEAD}
        machine = self.network.boot(f"n{self._count}", ip, ("/bin/bash", "-c", line), environment)
        self._count += 1
        return Node(machine, labels)

    def environment(self) -> dict[str, str]:
        """Return the environment of the image and of ``docker run``."""
        image = (ROOT / "deploy" / "Dockerfile").read_text()
        variables = dict(re.findall(r"\b((?:RAY|OSD)_\w+)=(\S+)", image))
        prefix = "--env="
        options = [option for option in self._cluster["docker"]["run_options"] if option.startswith(prefix)]
        variables |= dict(option.removeprefix(prefix).split("=") for option in options)
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("OSD_", "RAY_"))},
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def _ask(self, path: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx2.get(f"http://{HEAD}:8265{path}", headers=headers, timeout=30)

    def _wait(self, seconds: float, condition: Any, what: str, node: Node) -> None:
        def holds() -> bool:
            assert node.machine.process.poll() is None, node.machine.log.read_text()
            with contextlib.suppress(httpx2.HTTPError, json.JSONDecodeError):
                return bool(condition())
            return False

        wait_until(holds, seconds, every=0.2, what=what)


@contextlib.contextmanager
def running(home: Path) -> Iterator[Nodes]:
    """Run a head and a Redis, which also stores Ray's tables; all nodes have ``home`` as /data."""
    with network(home) as machines:
        nodes = Nodes(machines, home)
        nodes.start()
        yield nodes
