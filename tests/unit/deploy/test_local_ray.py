"""Calls of Ray that end when a server dies or the time is up; the servers are processes that only sleep."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from deploy import local_ray
from deploy.assembly import RayDied
from deploy.local_ray import LocalRay
from osd.config import Settings
from tests.waiting import HANG_SECONDS


class Servers:
    """Replacement of ``ray.init`` that starts sleeping processes and returns when ``up`` is set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.up = folder, threading.Event()
        self.up.set()
        self.started: list[subprocess.Popen[bytes]] = []

    def init(self, **_: object) -> None:
        if threading.current_thread() is threading.main_thread():  # as Ray does
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sleep = shutil.which("sleep")
        for name in ("gcs_server", "raylet"):
            shutil.copy(sleep, self.folder / name)
            self.started.append(subprocess.Popen([self.folder / name, "60"]))
        self.up.wait(HANG_SECONDS)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    monkeypatch.setattr(ray, "init", servers.init)
    monkeypatch.setattr(ray, "shutdown", lambda: [server.kill() for server in servers.started])
    yield servers
    servers.up.set()
    for server in servers.started:
        server.kill()
        server.wait()


@pytest.fixture
def node(servers: Servers, tmp_path: Path) -> Iterator[LocalRay]:
    node = LocalRay()
    node.start(Settings(home=tmp_path))
    yield node
    node.stop()


def forever() -> None:
    time.sleep(60)


@pytest.mark.parametrize(("index", "name"), [(0, "Ray's GCS"), (1, "Ray's raylet")])
def test_hanging_and_later_calls_end_when_a_server_dies(node, servers, index, name):
    victim = servers.started[index]
    threading.Timer(0.3, victim.kill).start()
    with pytest.raises(RayDied, match=rf"^{name} \(process {victim.pid}\) died$"):
        node.call("answer", 60, forever)
    for ask in (node.check, lambda: node.call("answer", 60, forever)):
        with pytest.raises(RayDied):
            ask()
    node.stop()
    assert all(server.poll() is not None for server in servers.started)


def test_failure_after_a_server_death_raises_ray_died(node, servers):
    def broken() -> None:
        servers.started[1].kill()
        servers.started[1].wait()
        raise ConnectionError("lost")

    with pytest.raises(RayDied):
        node.call("answer", 60, broken)


def test_start_ends_when_a_server_dies(servers, tmp_path):
    servers.up.clear()
    node = LocalRay()
    killer = threading.Timer(0.5, lambda: servers.started[1].kill())
    killer.start()
    with pytest.raises(RayDied, match="raylet"):
        node.start(Settings(home=tmp_path))
    node.stop()


def test_start_deletes_the_folder_of_the_start_before(servers, tmp_path):
    folders: list[Path] = []
    for _ in range(2):
        node = LocalRay()
        node.start(Settings(home=tmp_path))
        folders.append((tmp_path / "ray").resolve())
        node.stop()
    assert [folder.exists() for folder in folders] == [False, True]
    assert folders[1].stat().st_mode & 0o777 == 0o700


def test_start_follows_no_link_in_place_of_the_folder_before(servers, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "replaced").symlink_to(kept)
    (tmp_path / "ray").symlink_to(tmp_path / "replaced")
    node = LocalRay()
    node.start(Settings(home=tmp_path))
    node.stop()
    assert (kept / "file").exists()


def test_call_beyond_its_limit_raises_timeout_error(node):
    with pytest.raises(TimeoutError, match=r"^Ray does not answer within 0 seconds$"):
        node.call("answer", 0.1, forever)
    node.check()


def test_call_returns_the_result_or_raises_the_error(node):
    assert node.call("count", 5, len, "abc") == 3
    with pytest.raises(TypeError):
        node.call("count", 5, len, 3)


def test_servers_that_start_too_slowly_are_killed(servers, tmp_path, monkeypatch):
    servers.up.clear()
    monkeypatch.setattr(local_ray, "_START_SECONDS", 0.5)
    monkeypatch.setattr(local_ray, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(ray, "shutdown", forever)
    node = LocalRay()
    with pytest.raises(TimeoutError, match="Ray does not start"):
        node.start(Settings(home=tmp_path))
    node.stop()
    assert all(server.poll() is not None for server in servers.started)


def test_c_handler_of_ray_is_replaced_by_the_commands(servers, tmp_path, monkeypatch):
    heard: list[str] = []
    in_c = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: heard.append("in C"))
    monkeypatch.setattr(ray, "init", lambda **_: ctypes.CDLL(None).signal(signal.SIGTERM, in_c))
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("the command's"))
    try:
        node = LocalRay()
        node.start(Settings(home=tmp_path))
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["the command's"]
        node.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_start_keeps_the_signal_handler_of_the_command(servers, tmp_path):
    def stop(*_: object) -> None:
        raise AssertionError("not sent")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        node = LocalRay()
        node.start(Settings(home=tmp_path))
        assert signal.getsignal(signal.SIGTERM) is stop
        node.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stop_waits_for_calls_that_are_about_to_end(node, monkeypatch):
    shutdown = ray.shutdown
    at_shutdown = []
    monkeypatch.setattr(ray, "shutdown", lambda: [at_shutdown.append(call.done()), shutdown()])
    call = node.begin(time.sleep, 0.5)
    node.stop()
    assert at_shutdown == [True]
