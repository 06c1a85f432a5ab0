"""Ray clusters of several nodes on this machine, started and deployed to as ``ray_cluster.yaml`` and ``deploy/`` say.

Each node has an address of loopback of its own, and all its processes: a raylet, Ray's agents, a proxy, workers. Where
one machine cannot follow the files is in ``_on_this_machine`` and ``Nodes.deploy``.
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
_HEAD = 2  # 127.0.0.2; the others come behind it
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes


@dataclass(eq=False)
class Node:
    """One node: ``process`` is its ``ray start --block``, and has all others below it."""

    process: subprocess.Popen[bytes]
    ip: str
    port: int
    """Of its proxy, at 127.0.0.1: of several on one machine each needs its own."""
    labels: str

    def family(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def actors(self, kind: str) -> list[psutil.Process]:
        """The processes of the actors of a class."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if re.match(rf"ray::\w*{kind}\b", " ".join(process.cmdline())):  # of one that has ended it is empty
                    found.append(process)
        return found

    def kill(self) -> None:
        """Lose the node as a machine is lost: nothing on it says that it ends."""
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
    """A head without CPUs, and the nodes that ``joined`` it."""

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
        """Start the head, and wait until it answers."""
        (self.home / "ray-token").write_text(TOKEN)
        (self.home / "redis-password").write_text(PASSWORD)
        own = f"--dashboard-port={self._dashboard} --temp-dir={self.temp}"
        self.head = self._start(f"{self._cluster['head_start_ray_commands'][-1]} {own}")
        self._wait(START_SECONDS, lambda: self.head.ip in self.living(), "the head", self.head)

    @property
    def redis_url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.redis_port}/0"

    @property
    def all(self) -> list[Node]:
        return [self.head, *self.joined]

    def join(self, cpus: int, labels: str = "") -> Node:
        """Start one more node, and wait until the head knows it."""
        own = f"--num-cpus={cpus}" + f" --labels={labels}" * bool(labels)
        node = self._start(f"{self._cluster['worker_start_ray_commands'][-1]} {own}", labels)
        self.joined.append(node)
        self._wait(START_SECONDS, lambda: node.ip in self.living(), f"node {node.ip}", node)
        return node

    def lose(self, node: Node) -> None:
        node.kill()
        self.joined.remove(node)

    def living(self) -> list[str]:
        """Addresses of the nodes that the head takes for alive."""
        with contextlib.suppress(httpx2.HTTPError):
            answer = self._ask("/nodes?view=summary")
            if answer.status_code == 200:
                summary = answer.json()["data"]["summary"]
                return [one["raylet"]["nodeManagerAddress"] for one in summary if one["raylet"]["state"] == "ALIVE"]
        return []

    def replicas(self) -> dict[str, Node]:
        """The running replicas of Serve by their names, and where they are."""
        applications = self._ask("/api/serve/applications/").raise_for_status().json()["applications"]
        deployments = applications.get("osd", {"deployments": {}})["deployments"]
        running = [one for every in deployments.values() for one in every["replicas"] if one["state"] == "RUNNING"]
        places = {node.ip: node for node in self.joined}
        return {one["replica_id"]: places[one["node_ip"]] for one in running if one["node_ip"] in places}

    def deploy(self, **settings: object) -> None:
        """What ``serve deploy deploy/serve.yaml`` does, with ``settings`` over those of the file."""
        config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": self.head.port}  # tests listen on loopback alone
        (application,) = config["applications"]
        given = {key: self._here(str(value)) for key, value in application["args"].items()}
        application["args"] = given | {key: str(value) for key, value in settings.items()}
        file = self.home / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        command = ["serve", "deploy", "--address", f"http://127.0.0.1:{self._dashboard}", str(file)]
        done = subprocess.run(command, env=self._environment(self.head.port), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_until_deployed(self) -> None:
        def running() -> bool:
            answer = self._ask("/api/serve/applications/")
            application = answer.json()["applications"].get("osd", {}) if answer.status_code == 200 else {}
            assert application.get("status") != "DEPLOY_FAILED", application["message"]
            return application.get("status") == "RUNNING"

        self._wait(DEPLOY_SECONDS, running, "the application", self.head)

    def close(self) -> None:
        """End everything; nothing is left."""
        for node in self._started:
            node.kill()

    def _start(self, command: str, labels: str = "") -> Node:
        ip, port = f"127.0.0.{self._next}", free_port()
        self._next += 1
        own = f"--block --node-ip-address={ip} --object-store-memory={_OBJECT_STORE_BYTES}"
        ports = f"--dashboard-agent-listen-port={free_port()} --disable-usage-stats"
        with (self.home / f"{ip}.log").open("wb") as log:
            command = f"exec env {self._here(command)} {own} {ports}"
            process = subprocess.Popen(
                ["/bin/bash", "-c", command], env=self._environment(port), cwd=self.home, stdout=log, stderr=log
            )
        self._started.append(node := Node(process, ip, port, labels))
        return node

    def _here(self, given: str) -> str:
        """A command or a setting of the files, with the addresses and folders of this machine."""
        for there, here in {
            "redis:6379": f"127.0.0.1:{self.redis_port}",
            "--port=6379": f"--port={self._port}",
            "$RAY_HEAD_IP:6379": f"127.0.0.{_HEAD}:{self._port}",
            "--autoscaling-config=~/ray_bootstrap_config.yaml": "",  # ray up would have written it
            "/data": str(self.home),
        }.items():
            given = given.replace(there, here)
        return given

    def _environment(self, port: int) -> dict[str, str]:
        """That of the image, and what ``docker run`` is told."""
        image = (ROOT / "deploy" / "Dockerfile").read_text()
        told = dict(re.findall(r"\b(RAY_\w+)=(\S+)", image))
        options = self._cluster["docker"]["run_options"]
        told |= dict(one.removeprefix("--env=").split("=") for one in options if one.startswith("--env="))
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("OSD_", "RAY_"))},
            **{key: self._here(value) for key, value in told.items()},
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
    """A head with a Redis of its own, which keeps the tables of Ray's GCS too; ``home`` is what all nodes share."""
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
