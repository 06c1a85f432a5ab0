"""Pods of the RayService as KubeRay makes them, on machines made of namespaces.

A machine stands for a pod: it has the commands, the environment, the files and the probes of the pod, without a
container and its limits. Scheduling, services and network policies are left out.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.cluster.machines import Machine, Network, network
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
REDIS, HEAD = "192.0.2.5", "192.0.2.10"
SECRETS = "/run/secrets/osd"
_AGENT, _DASHBOARD = 52365, 8265
_HEALTH = f"http://127.0.0.1:{_AGENT}/api/local_raylet_healthz"


@dataclass
class Pods:
    """Head and pods with replicas, and the Redis of ``redis.yaml`` with TLS.

    Attributes:
        service: the rendered RayService.
        machines: their network.
        home: the folder of the claim.
        key: key of clients.
    """

    service: dict[str, Any]
    machines: Network
    home: Path
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    replicas: list[Machine] = field(default_factory=list)

    def start(self) -> None:
        """Start Redis and all pods of the RayService, and wait until their probes succeed."""
        server = _find_tls_server()
        self._token, self._password = secrets.token_hex(16), secrets.token_hex(16)
        folder = self.home / "secrets"
        folder.mkdir()
        files = {
            "redis-password": self._password,
            "ray-redis-password": self._password,
            "api-key": self.key,
            "admin-key": secrets.token_hex(16),
        }
        for name, content in files.items():
            (folder / name).write_text(content)
        self._certify(folder)
        self.machines.names |= {"redis": REDIS, "ray-redis": REDIS}
        options = {
            "bind": REDIS, "port": "0", "tls-port": "6379", "tls-auth-clients": "no",
            "tls-cert-file": "/data/secrets/redis-ca", "tls-key-file": "/data/secrets/tls.key",
            "requirepass": self._password, "maxmemory-policy": "noeviction", "save": "", "dir": "/tmp",
        }  # fmt: skip
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self.machines.boot("redis", REDIS, (server, *arguments))
        cluster = self.service["spec"]["rayClusterConfig"]
        self._pod("head", HEAD, cluster["headGroupSpec"])
        (group,) = cluster["workerGroupSpecs"]
        self.replicas = [self._pod(f"w{n}", f"192.0.2.{11 + n}", group) for n in range(group["replicas"])]

    def ask(self, method: str, path: str, content: Any = None) -> httpx2.Response:
        """Call the API of Ray's head."""
        headers = {"Authorization": f"Bearer {self._token}"}
        return httpx2.request(method, f"http://{HEAD}:{_DASHBOARD}{path}", json=content, headers=headers, timeout=60)

    def leave(self, pod: Machine) -> subprocess.CompletedProcess[str]:
        """Run the command that runs before a pod with a replica ends."""
        (group,) = self.service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        (container,) = group["template"]["spec"]["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        return pod.run(*command, environment=self._environment(group, head=False))

    def _environment(self, group: dict[str, Any], head: bool) -> dict[str, str]:
        cluster = self.service["spec"]["rayClusterConfig"]
        (container,) = group["template"]["spec"]["containers"]
        image = dict(re.findall(r"\b((?:RAY|OSD)_\w+)=(\S+)", (ROOT / "deploy/Dockerfile").read_text()))
        pod = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        kuberay = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_PORT": "6379",
            "RAY_ADDRESS": "127.0.0.1:6379" if head else f"{HEAD}:6379",
        }
        if head:
            kuberay |= {
                "RAY_REDIS_ADDRESS": cluster["gcsFaultToleranceOptions"]["redisAddress"],
                "REDIS_PASSWORD": self._password,
                "RAY_external_storage_namespace": "osd-uid",
            }
        else:
            kuberay |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("OSD_", "RAY_"))}
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return {**outside, **image, **pod, **kuberay, **paths}

    def _pod(self, name: str, ip: str, group: dict[str, Any]) -> Machine:
        head = name == "head"
        options = {**group["rayStartParams"], "metrics-export-port": "8080", "dashboard-agent-listen-port": str(_AGENT)}
        if head:
            options |= {"port": "6379", "redis-password": '"$REDIS_PASSWORD"'}
        else:
            options |= {"address": f"{HEAD}:6379", "num-cpus": "2"}  # this machine has fewer CPUs than the pod
        line = " ".join(f"--{key}={value}" for key, value in sorted(options.items()))
        mount = f"mkdir -p {SECRETS} && mount --bind /data/secrets {SECRETS}"
        command = f"{mount} && exec ray start {'--head ' * head}{line} --block"
        machine = self.machines.boot(name, ip, ("/bin/bash", "-c", command), self._environment(group, head))
        probe = ("wget", "--tries", "1", "-T", "2", "-q", "-O-", _HEALTH)
        wait_until(lambda: machine.run(*probe).returncode == 0, every=0.5, what=f"the probe of {name}")
        return machine

    def _certify(self, folder: Path) -> None:
        """Make the certificate as ``secrets.sh`` does."""
        script = (ROOT / "deploy/kuberay/secrets.sh").read_text()
        command = re.search(r"openssl req .*?(?= 2>)", script, re.DOTALL)
        assert command is not None
        subprocess.run(["/bin/sh", "-c", command[0]], cwd=folder, check=True, capture_output=True)


@contextmanager
def running(service: dict[str, Any], home: Path) -> Iterator[Pods]:
    """Start the pods of a RayService; ``home`` is the folder of the claim."""
    with network(home) as machines:
        pods = Pods(service, machines, home)
        pods.start()
        yield pods


def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    """Return the part of Ray Serve."""
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def _find_tls_server() -> str:
    """Return a redis-server that supports TLS; skip the test without one."""
    for folder in os.environ["PATH"].split(os.pathsep):
        server = shutil.which("redis-server", path=folder)
        if server and "libssl" in subprocess.run(["/usr/bin/ldd", server], capture_output=True, text=True).stdout:
            return server
    pytest.skip("no redis-server with TLS is on the PATH: install Debian's package redis-server")
