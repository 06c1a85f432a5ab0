"""Machines with Docker and ssh, on which a user follows ``docs/cluster.md``.

They are made of namespaces, with podman in Docker's place. The commands come from the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from osd.capture.server import find_server
from tests.cluster.machines import Machine, Network, check_namespaces, network
from tests.image.engine import Engine, find_base

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/osd:0.2.0"
OPERATOR, REDIS, RAY_REDIS = "192.0.2.9", "192.0.2.5", "192.0.2.6"
ADDRESSES = {"n0": "192.0.2.10", "n1": "192.0.2.11", "n2": "192.0.2.12"}
"""Machines of ``ray_cluster.yaml``: the head, and two that serve."""

_SCRIPT = Path(__file__).with_name("host.sh")
_PROGRAMS = ("podman", "sudo", "rsync", "ssh", "ssh-keygen", "/usr/sbin/sshd")
_SECTION = re.compile(r"^## On three machines$(.*?)^## ", re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"^ {8}(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Steps:
    """Steps of the page for three machines, by number: the text of each, and its commands."""

    text: dict[int, str]
    commands: dict[int, str]


def steps() -> Steps:
    """Read the page."""
    section = _SECTION.search((ROOT / "docs/cluster.md").read_text())
    assert section is not None
    text = {int(number): text for number, text in _STEP.findall(section[1])}
    return Steps(text, {number: "\n".join(_COMMANDS.findall(lines)) for number, lines in text.items()})


@dataclass
class Hosts:
    """Machines of ``ray_cluster.yaml``, the machine of the operator, and two Redis servers.

    Attributes:
        machines: their network.
        data: the folder /data of all machines.
        keys: folder with the ssh key of the operator.
        passwords: word of the page that stands for a password, and the password.
    """

    machines: Network
    data: Path
    keys: Path
    passwords: dict[str, str]
    operator: Machine = field(init=False)
    serving: dict[str, Machine] = field(default_factory=dict)

    def start(self) -> None:
        """Start all machines, with the commands of the page for the Redis servers."""
        self.machines.names |= {"redis": REDIS, "ray-redis": RAY_REDIS, **ADDRESSES}
        lines = steps().commands[2].splitlines()
        assert [line.rpartition("# ")[2] for line in lines] == ["redis", "ray-redis"]
        for line, (name, ip) in zip(lines, {"redis": REDIS, "ray-redis": RAY_REDIS}.items(), strict=True):
            command = self.filled(line).replace("redis-server", f"{find_server()} --bind {ip} --dir /tmp")
            self.machines.boot(name, ip, ("/bin/bash", "-c", f"exec {command}"))
        key = ("-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / "id_ed25519"))
        subprocess.run([str(shutil.which("ssh-keygen")), *key], check=True)
        self.operator = self._boot("operator", OPERATOR)
        self.serving = {name: self._boot(name, ip) for name, ip in ADDRESSES.items()}

    def filled(self, commands: str) -> str:
        """Return commands of the page with the passwords of this cluster."""
        for word in sorted(self.passwords, key=len, reverse=True):
            commands = commands.replace(word, self.passwords[word])
        return commands

    def follow(self, commands: str, user: str = "osd") -> str:
        """Run commands of the page on the machine of the operator, in the source tree, and return their output."""
        script = f"cd {ROOT} && {self.filled(commands)}"
        as_user = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        done = self.operator.run(*as_user, "bash", "-ec", script, environment=_environment(user))
        assert done.returncode == 0, f"{commands}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def _boot(self, name: str, ip: str) -> Machine:
        open_paths = (sys.base_prefix, sys.prefix, str(ROOT))
        return self.machines.boot(name, ip, (str(_SCRIPT), str(self.keys), ip, *open_paths))


def _environment(user: str) -> dict[str, str]:
    """Return the environment of the operator's shell."""
    home = "/root" if user == "root" else f"/home/{user}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": home, "USER": user, "PATH": path, "LANG": "C.UTF-8"}


@contextmanager
def running(data: Path, keys: Path, passwords: dict[str, str]) -> Iterator[Hosts]:
    """Start the machines; skip the test where they cannot run containers."""
    check_namespaces()
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"machines with Docker and ssh need {', '.join(missing)}: install Debian's packages of these names")
    engine = Engine("podman")
    find_base(engine)
    engine.build("cpu", IMAGE)
    if refusal := engine.refusal(IMAGE):
        pytest.skip(refusal)
    with network(data) as machines:
        hosts = Hosts(machines, data, keys, passwords)
        hosts.start()
        yield hosts
