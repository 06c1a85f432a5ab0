"""Ray clusters of several nodes on this machine, started from ``ray_cluster.yaml`` and the files in ``deploy/``.

Each node has its own loopback address and all its processes: raylet, Ray's agents, proxy, workers. ``Nodes._adapt`` and
``Nodes.deploy`` contain the differences from the files that one machine needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yaml

from tests.redis_servers import PASSWORD, free_port, run
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_SECONDS, DEPLOY_SECONDS, END_SECONDS = 90.0, 240.0, 15.0
TOKEN = "5" * 32
_HEAD = 2  # 127.0.0.2; other nodes have the following addresses
_OBJECT_STORE_BYTES = 80 << 20  # the minimum of Ray


@dataclass(eq=False)
class Node:
    """One node.

    Attributes:
        process: its ``ray start --block``, the ancestor of all its processes.
        ip: its loopback address.
        port: the port of its proxy at 127.0.0.1; each node of a machine needs its own.
        labels: its labels.
    """

    process: subprocess.Popen[bytes]
    ip: str
    port: int
    labels: str

    def family(self) -> list[psutil.Process]:
        """Return all processes of the node."""
        if self.process.poll() is not None:
            return []
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return the processes of an actor class."""
        processes = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if re.match(rf"ray::\w*{kind}\b", " ".join(process.cmdline())):  # empty for an ended process
                    processes.append(process)
        return processes

    def kill(self) -> None:
        """Kill the node like a failed machine: no process announces its end."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_SECONDS)
        psutil.wait_procs(family, END_SECONDS)


@dataclass
class Nodes:
    """Head without CPUs, and the nodes that ``joined`` it."""

    home: Path
    redis_port: int
    temp: Path
    head: Node = field(init=False)
    joined: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cluster = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
        self._port, self._dashboard = free_port(), free_port()
        self._next = _HEAD
        self._started: list[Node] = []

    def start(self) -> None:
        """Start the head and wait until it answers."""
        (self.home / "ray-token").write_text(TOKEN)
        for name in ("redis-password", "ray-redis-password"):
            (self.home / name).write_text(PASSWORD)
        options = f"--dashboard-port={self._dashboard} --temp-dir={self.temp}"
        self.head = self._start(f"{self._cluster['head_start_ray_commands'][-1]} {options}")
        self._wait(START_SECONDS, lambda: self.head.ip in self.living(), "the head", self.head)

    @property
    def redis_url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.redis_port}/0"

    @property
    def all(self) -> list[Node]:
        return [self.head, *self.joined]

    def join(self, cpus: int, labels: str = "") -> Node:
        """Start another node and wait until the head knows it."""
        options = f"--num-cpus={cpus}" + f" --labels={labels}" * bool(labels)
        node = self._start(f"{self._cluster['worker_start_ray_commands'][-1]} {options}", labels)
        self.joined.append(node)
        self._wait(START_SECONDS, lambda: node.ip in self.living(), f"node {node.ip}", node)
        return node

    def lose(self, node: Node) -> None:
        """Kill a node."""
        node.kill()
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
        """Deploy as ``serve deploy deploy/serve.yaml`` does, with ``settings`` over those of the file."""
        config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": self.head.port}  # tests listen only on loopback
        (application,) = config["applications"]
        arguments = {key: self._adapt(str(value)) for key, value in application["args"].items()}
        del arguments["serving.api_key_file"]  # a service on loopback needs no key
        arguments["serving.host"] = "127.0.0.1"
        application["args"] = arguments | {key: str(value) for key, value in settings.items()}
        file = self.home / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        command = ["serve", "deploy", "--address", f"http://127.0.0.1:{self._dashboard}", str(file)]
        result = subprocess.run(command, env=self._environment(self.head.port), capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    def wait_until_deployed(self) -> None:
        """Wait until the application runs."""

        def running() -> bool:
            answer = self._ask("/api/serve/applications/")
            application = answer.json()["applications"].get("osd", {}) if answer.status_code == 200 else {}
            assert application.get("status") != "DEPLOY_FAILED", application["message"]
            return application.get("status") == "RUNNING"

        self._wait(DEPLOY_SECONDS, running, "the application", self.head)

    def close(self) -> None:
        """End all processes."""
        for node in self._started:
            node.kill()

    def _start(self, command: str, labels: str = "") -> Node:
        ip, port = f"127.0.0.{self._next}", free_port()
        self._next += 1
        address = f"--block --node-ip-address={ip} --object-store-memory={_OBJECT_STORE_BYTES}"
        ports = f"--dashboard-agent-listen-port={free_port()} --disable-usage-stats"
        with (self.home / f"{ip}.log").open("wb") as log:
            command = f"exec env {self._adapt(command)} {address} {ports}"
            process = subprocess.Popen(
                ["/bin/bash", "-c", command], env=self._environment(port), cwd=self.home, stdout=log, stderr=log
            )
        self._started.append(node := Node(process, ip, port, labels))
        return node

    def _adapt(self, text: str) -> str:
        """Return a command or a setting of the files with the addresses and folders of this machine."""
        for original, local in {
            "ray-redis:6379": f"127.0.0.1:{self.redis_port}",
            "redis:6379": f"127.0.0.1:{self.redis_port}",
            "--port=6379": f"--port={self._port}",
            "$RAY_HEAD_IP:6379": f"127.0.0.{_HEAD}:{self._port}",
            "--autoscaling-config=~/ray_bootstrap_config.yaml": "",  # a file that ray up writes
            "/data": str(self.home),
        }.items():
            text = text.replace(original, local)
        return text

    def _environment(self, port: int) -> dict[str, str]:
        """Return the environment of the image and of ``docker run``."""
        image = (ROOT / "deploy" / "Dockerfile").read_text()
        variables = dict(re.findall(r"\b(RAY_\w+)=(\S+)", image))
        options = self._cluster["docker"]["run_options"]
        prefix = "--env="
        variables |= dict(option.removeprefix(prefix).split("=") for option in options if option.startswith(prefix))
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("OSD_", "RAY_"))},
            **{key: self._adapt(value) for key, value in variables.items()},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port),
        }

    def _ask(self, path: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx2.get(f"http://127.0.0.1:{self._dashboard}{path}", headers=headers, timeout=30)

    def _wait(self, seconds: float, condition: Any, what: str, node: Node) -> None:
        def holds() -> bool:
            assert node.process.poll() is None, (self.home / f"{node.ip}.log").read_text()
            with contextlib.suppress(httpx2.HTTPError, json.JSONDecodeError):
                return bool(condition())
            return False

        wait_until(holds, seconds, every=0.2, what=what)


@contextlib.contextmanager
def running(home: Path) -> Iterator[Nodes]:
    """Run a head with its own Redis, which also stores Ray's GCS tables; all nodes share ``home``."""
    temp = Path(tempfile.mkdtemp(prefix="osd-ray-", dir="/tmp"))  # the paths of Ray's sockets must be short
    try:
        secured = ('save ""', f"requirepass {PASSWORD}", "maxmemory-policy noeviction")
        with run(home / "redis", *secured) as redis_port:
            nodes = Nodes(home, redis_port, temp)
            try:
                nodes.start()
                yield nodes
            finally:
                nodes.close()
    finally:
        shutil.rmtree(temp, ignore_errors=True)
