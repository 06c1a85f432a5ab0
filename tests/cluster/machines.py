"""Machines made of namespaces: each has its own address, host name, processes, file system and shared memory.

A switch in a network namespace of its own connects them, so nothing reaches the network of this machine. All machines
share the folder /data, as by NFS. Without root they cannot be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

END_SECONDS = 15.0
NETWORK = "192.0.2"
"""Addresses for documentation, which are those of ``ray_cluster.yaml``."""

_PROGRAMS = {name: shutil.which(name) for name in ("ip", "bridge", "nsenter", "unshare")}
_SCRIPT = Path(__file__).with_name("machine.sh")
_CLONE_NEWNET = 0x40000000
_CLIENT = "client"
_DISABLED, _FORWARDING = 0, 3
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class Machine:
    """Machine that runs one program and its children.

    Attributes:
        network: the network that it is part of.
        name: its host name.
        ip: its address.
        log: file with the output of the program.
        process: parent of its first process.
    """

    network: Network
    name: str
    ip: str
    log: Path
    process: subprocess.Popen[bytes]

    def family(self) -> list[psutil.Process]:
        """Return the first process and all its descendants."""
        if self.process.poll() is not None:
            return []
        return psutil.Process(self.process.pid).children(recursive=True)

    def run(self, *command: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, in the folder /data, and return its result."""
        return subprocess.run(self._entered(command), env=environment, capture_output=True, text=True, timeout=600)

    def start(self, *command: object, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on the machine, in the folder /data."""
        pipe = subprocess.PIPE
        return subprocess.Popen(self._entered(command), env=environment, stdout=pipe, stderr=pipe, text=True)

    def _entered(self, command: Sequence[object]) -> list[str]:
        first = self.family()[0].pid
        enter = [str(_PROGRAMS["nsenter"]), f"--target={first}", "--all"]
        return [*enter, "/bin/sh", "-c", 'cd /data && exec "$@"', "sh", *map(str, command)]

    def cut(self) -> None:
        """Separate the machine from the network: the switch drops all of its packets."""
        self.network.set_port(self.name, _DISABLED)

    def heal(self) -> None:
        """Connect the machine to the network again."""
        self.network.set_port(self.name, _FORWARDING)

    def kill(self) -> None:
        """End all processes at once, like a machine without power."""
        family = self.family()
        self.process.kill()
        self.process.wait(END_SECONDS)
        psutil.wait_procs(family, END_SECONDS)


@dataclass
class Network:
    """Switch, and the machines at its ports; ``folder`` has their files, ``data`` becomes /data on each machine."""

    folder: Path
    data: Path
    names: dict[str, str] = field(default_factory=dict)
    machines: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prefix = f"osd{os.getpid()}"
        self._taken: set[str] = set()
        _ip("netns", "add", self._namespace("switch"))
        self._on_switch("link", "add", "br0", "type", "bridge")
        self._on_switch("link", "set", "br0", "up")
        self._connect(_CLIENT, f"{NETWORK}.2")

    def boot(self, name: str, ip: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Machine:
        """Start a machine; its first process becomes ``command``."""
        if name not in self._taken:
            self._connect(name, ip)
        own = self.folder / name
        own.mkdir(exist_ok=True)
        log, hosts = self.folder / f"{name}.log", self.folder / f"{name}.hosts"
        addresses = {"localhost": "127.0.0.1", name: ip, **self.names}
        hosts.write_text("".join(f"{address} {host}\n" for host, address in addresses.items()))
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL", "--propagation=private"]
        inside = [str(part) for part in (_SCRIPT, name, own, self.data, hosts, *command)]
        enter = [_PROGRAMS["nsenter"], f"--net=/run/netns/{self._namespace(name)}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*enter, _PROGRAMS["unshare"], *spaces, *inside],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
            )  # fmt: skip
        machine = Machine(self, name, ip, log, process)
        self.machines.append(machine)

        def is_booted() -> bool:
            assert process.poll() is None, log.read_text()
            return "booted\n" in log.read_text()

        wait_until(is_booted, what=f"the start of {name}")
        return machine

    def set_port(self, name: str, state: int) -> None:
        """Set the state of the switch's port of a machine: 0 drops everything without a message, 3 forwards."""
        switch = f"--net=/run/netns/{self._namespace('switch')}"
        change = ("link", "set", "dev", _port(name), "state", str(state))
        _run("nsenter", switch, str(_PROGRAMS["bridge"]), *change)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put this thread, and threads and processes that it starts, into the network as a machine of its own."""
        with (
            Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open() as before,
            Path(f"/run/netns/{self._namespace(_CLIENT)}").open() as inside,
        ):
            _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def close(self) -> None:
        """End all machines and the network."""
        for machine in self.machines:
            machine.kill()
        for name in (*self._taken, "switch"):
            subprocess.run([_PROGRAMS["ip"], "netns", "del", self._namespace(name)], check=False)

    def _connect(self, name: str, ip: str) -> None:
        space, port = self._namespace(name), _port(name)
        _ip("netns", "add", space)
        self._taken.add(name)
        self._on_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._on_switch("link", "set", port, "master", "br0", "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{ip}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            # It leads nowhere; Ray finds the address of its node by it.
            ("route", "add", "default", "via", f"{NETWORK}.1"),
        ):
            _ip("-n", space, *command)

    def _on_switch(self, *command: str) -> None:
        _ip("-n", self._namespace("switch"), *command)

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"


def check_namespaces() -> None:
    """Skip the test on a machine that cannot make namespaces."""
    missing = [name for name, program in _PROGRAMS.items() if program is None]
    if os.geteuid() != 0 or missing:
        needs = "root" if os.geteuid() != 0 else f"the programs {', '.join(missing)}"
        pytest.skip(
            f"machines made of namespaces need {needs}: run this as root, with Debian's iproute2 and util-linux"
        )


@contextlib.contextmanager
def network(data: Path) -> Iterator[Network]:
    """Make a network, and enter it; skip the test on a machine that cannot."""
    check_namespaces()
    folder = Path(tempfile.mkdtemp(prefix="osd-machines-", dir="/tmp"))
    try:
        made = Network(folder, data)
        try:
            with made.entered():
                yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _port(name: str) -> str:
    return f"p-{name}"


def _ip(*command: str) -> None:
    _run("ip", *command)


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run([_PROGRAMS[program], *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr}"


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
