"""Ports and stored bytes of a real ``osd up``: Ray listens on loopback, needs a token, and stores no secret."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
import redis

from deploy.local_ray import BOUNDS
from tests import redis_servers
from tests.command import family, osd, small_options, wait_until_it_answers
from tests.redis_servers import PASSWORD, acl_rules, free_port
from tests.waiting import HANG_SECONDS, wait_until

API_KEY, ADMIN_KEY = "planted-api-key", "planted-admin-key"
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """Administrator of a Redis in which Ray's GCS keeps its tables, with the rights that docs/machines.md lists."""
    with (
        redis_servers.run(
            tmp_path_factory.mktemp("gcs"), 'save ""', "rdbcompression no", arguments=("--protected-mode", "no")
        ) as port,
        redis.Redis(port=port, username="admin", password=PASSWORD) as client,
    ):
        with redis.Redis(port=port) as founder:
            founder.execute_command("ACL SETUSER", "admin", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        client.execute_command("ACL SETUSER", "default", "reset", "on", "nopass", *acl_rules("ray"))
        yield client


@pytest.fixture(scope="module")
def service(
    tiny_target: Path, tables: redis.Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Path]]:
    """Process and home of a running ``osd up`` with keys, and a Redis with a password for traces."""
    home, port, folder = tmp_path_factory.mktemp("place") / "home", free_port(), tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch, redis_servers.run(folder, f"requirepass {PASSWORD}") as traces:
        patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{tables.connection_pool.connection_kwargs['port']}")
        patch.setenv("OSD_SERVING__API_KEY", API_KEY)
        patch.setenv("OSD_SERVING__ADMIN_KEY", ADMIN_KEY)
        patch.setenv("OSD_REDIS_URL", f"redis://:{PASSWORD}@127.0.0.1:{traces}/0")
        patch.delenv("RAY_AUTH_MODE", raising=False)
        with osd(home, "up", *small_options(tiny_target, port)) as process:
            wait_until_it_answers(process, port)
            wait_until((home / "running.json").exists)
            yield process.pid, home


def ports(pid: int) -> set[tuple[str, str, int]]:
    """Return command, address and port of all listening sockets of a process and its descendants."""
    sockets: set[tuple[str, str, int]] = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    sockets.add((command, connection.laddr.ip, connection.laddr.port))
    return sockets


def refusal(port: int, path: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Return the status of a failing gRPC call."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(path, lambda text: text, lambda text: text)
        with pytest.raises(grpc.RpcError) as failed:
            call(b"", metadata=metadata, timeout=30)
    return failed.value.code()  # pyright: ignore[reportAttributeAccessIssue] # grpc gives it no type


def test_all_ports_but_the_replicas_are_on_loopback(service):
    sockets = ports(service[0])
    assert any("gcs_server" in command for command, _, _ in sockets)
    # Serve binds the port through which the proxy reaches a replica to every interface.
    reachable = [command for command, address, _ in sockets if address not in LOOPBACK]
    assert [command.partition(":")[2][:14] for command in reachable] == [":ServeReplica:"]


def test_calls_without_the_token_are_refused(service):
    pid, home = service
    token_file = home / "ray-token"
    assert token_file.stat().st_mode & 0o777 == 0o600
    token = ("authorization", f"Bearer {token_file.read_text()}")
    sockets = ports(pid)
    (replica,) = (port for command, address, port in sockets if "ServeReplica" in command and address not in LOOPBACK)
    path = "/ray.serve.ASGIService/HandleRequestStreaming"
    assert refusal(replica, path) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(replica, path, ("authorization", "Bearer wrong")) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(replica, path, token) is not grpc.StatusCode.UNAUTHENTICATED
    (gcs,) = {port for command, _, port in sockets if "gcs_server" in command}
    kept = "/ray.rpc.InternalKVGcsService/InternalKVGet"
    assert refusal(gcs, kept) is grpc.StatusCode.UNAUTHENTICATED
    (agent,) = {port for command, _, port in sockets if "RuntimeEnvAgent" in command}
    assert httpx2.post(f"http://127.0.0.1:{agent}/get_or_create_runtime_env").status_code == 401


def test_tables_of_ray_hold_no_secret(service, tables: redis.Redis):
    stored = b"".join(tables.dump(key) or b"" for key in tables.scan_iter())
    assert b"osd.sealed" in stored  # the arguments of the replica
    for secret in (API_KEY, ADMIN_KEY, PASSWORD, (service[1] / "ray-token").read_text()):
        assert secret.encode() not in stored


def test_rights_of_ray_suffice_for_its_tables(service, tables: redis.Redis):
    assert tables.dbsize() > 0
    assert tables.execute_command("ACL LOG") == []


def test_files_of_home_are_the_owners_alone(service):
    home = service[1]
    modes = {path.relative_to(home): path.stat().st_mode & 0o077 for path in (home, *home.rglob("*"))}
    assert {name for name, mode in modes.items() if mode} == set()
    assert {Path(name) for name in ("secrets.json", "ray-token", "registry/general/1/model.safetensors")} < modes.keys()


def test_sockets_of_ray_are_behind_a_private_folder(service):
    pid, home = service
    folder = (home / "ray").resolve()
    assert folder.stat().st_mode & 0o777 == 0o700
    servers = {process.name(): process for process in family(pid)}
    sockets = [connection.laddr for connection in servers["raylet"].net_connections("unix") if connection.laddr]
    assert sockets
    assert {folder in Path(str(socket)).parents for socket in sockets} == {True}


def test_memory_logs_and_objects_of_ray_are_bounded(service):
    servers = {process.name(): process for process in family(service[0])}
    assert servers["raylet"].environ().items() >= BOUNDS.items()
    (config,) = (option for option in servers["gcs_server"].cmdline() if option.startswith("--config_list="))
    assert not json.loads(base64.b64decode(config.partition("=")[2]))["automatic_object_spilling_enabled"]


def test_token_and_keys_are_not_on_a_command_line(service):
    commands = " ".join(command for command, _, _ in ports(service[0]))
    for secret in (API_KEY, ADMIN_KEY, PASSWORD, (service[1] / "ray-token").read_text()):
        assert secret not in commands


def test_disabled_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with osd(tmp_path, "up", "--set", f"serving.port={free_port()}") as process:
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert errors.startswith("osd: RAY_AUTH_MODE is disabled")
