"""Redis deployments: failover to a replica, TLS, a prefix per service, and a cluster."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import redis
from redis.connection import SSLConnection

from osd.capture.purge import Member, Purges
from osd.capture.reader import TraceReader
from osd.capture.server import RedisSetupError, open_redis
from osd.capture.streams import stream_of
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings, Settings, load_settings
from osd.redis_client import connect
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from serving.access.keys import Limits
from serving.access.windows import Windows
from tests.pointers import put
from tests.redis_servers import PASSWORD, TcpProxy, pair, run

CAPTURE = CaptureSettings(max_records=100)
ROLLOUT = Rollout(stable=1, canary=None, share=0.0, changed=0.0)


def client_of(port: int) -> redis.Redis:
    return redis.Redis(port=port, password=PASSWORD, protocol=2)


def test_writes_reach_the_new_master_after_a_failover(tmp_path):
    with pair(tmp_path) as (old, new), TcpProxy(old) as address:
        url = f"redis://:{PASSWORD}@127.0.0.1:{address.port}/0"
        clients = [connect(url) for _ in range(3)]
        plain, scripted, transacted = clients
        script = scripted.register_script("redis.call('INCR', KEYS[1])")

        def transact(value: int) -> None:
            with transacted.pipeline() as pipe:
                pipe.set("b", value).set("c", value)
                pipe.execute()

        plain.set("a", 1)
        script(keys=["count"])
        transact(1)
        with client_of(new) as server, client_of(old) as demoted:
            demoted.wait(1, 2000)
            server.replicaof("NO", "ONE")
            demoted.replicaof("127.0.0.1", new)
            address.behind = new
            plain.set("a", 2)
            script(keys=["count"])
            transact(2)
            assert server.mget("a", "b", "c", "count") == [b"2", b"2", b"2", b"2"]
        for client in clients:
            client.close()


def test_write_to_a_replica_without_a_master_is_an_error(tmp_path):
    with pair(tmp_path) as (_, replica), connect(f"redis://:{PASSWORD}@127.0.0.1:{replica}/0") as client:
        with pytest.raises(redis.ReadOnlyError):
            client.set("a", 1)
        assert client.get("a") is None


def use_everything(url: str, name: str, root: Path) -> None:
    """Write all kinds of data that osd stores in Redis, with a registry in ``root``."""
    (root / "general" / str(ROLLOUT.stable)).mkdir(parents=True)
    with Pointer(url, root) as pointer, Events(url) as events, ReplicaLoads(url) as loads, Purges(url) as purges:
        moved = put(pointer, "general", ROLLOUT)
        assert pointer.all() == {"general": moved}
        events.add("published", "general", 1, name=name)
        assert [event["name"] for event in events.recent()] == [name]
        loads.report(name, ReplicaLoad(1, 0, 1, 1.0))
        assert loads.read().keys() == {name}
        purges.add("r")
        purges.alive(Member("replica", name))
        assert purges.members().keys() == {Member("replica", name)}
    for used in (1, 2):  # each like a new replica
        windows = Windows(url)
        counted = windows.admit("key", Limits(requests_per_minute=10)).requests
        assert counted is not None
        assert counted.remaining == 10 - used
        windows.close()


def test_two_services_share_a_redis_with_prefixes(redis_url, redis_client, make_trace, eventually, tmp_path):
    prefixes = "first:", "second:"
    for prefix in prefixes:
        url = load_settings(None, [f"redis_url={redis_url}", f"redis_prefix={prefix}"], {}).redis_url
        assert url is not None
        use_everything(url, prefix, tmp_path / prefix.removesuffix(":"))
        writer, reader = TraceWriter(url, CAPTURE), TraceReader(url, CAPTURE, "general", "trainer", "c")
        writer.offer(make_trace(prefix))
        assert [delivered.record.request_id for delivered in reader.read(9, block_ms=5000)] == [prefix]
        assert reader.waiting().records == 1
        writer.close()
        reader.close()
    keys = [key.decode() for key in redis_client.scan_iter()]
    halves = [{key.removeprefix(prefix) for key in keys if key.startswith(prefix)} for prefix in prefixes]
    assert sum(map(len, halves)) == len(keys)
    assert halves[0] - {"osd:replica:first:"} == halves[1] - {"osd:replica:second:"}
    assert stream_of(CAPTURE.stream, "general") in halves[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """Self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, so no certificate can be created")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    options = ["req", "-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    options += ["-subj", "/CN=osd", "-addext", "subjectAltName=IP:127.0.0.1"]
    options += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run([openssl, *options], check=True, capture_output=True)
    return certificate, key


def test_tls_connects_only_to_a_server_with_a_trusted_ca(redis_url, certificate, tmp_path):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    secret, _, place = redis_url.removeprefix("redis://:").partition("@")
    password = tmp_path / "password"
    password.write_text(secret + "\n")
    with TcpProxy(int(place.partition(":")[2].partition("/")[0]), tls) as address:
        options = [f"redis_url=rediss://127.0.0.1:{address.port}/0", f"redis.password_file={password}"]
        settings = load_settings(None, [*options, f"redis.ca_file={certificate[0]}"], {})
        with open_redis(settings) as handle, connect(handle.url) as client:
            assert client.ping()
        with pytest.raises(RedisSetupError, match="certificate verify failed"):
            open_redis(load_settings(None, options, {}))


def test_tls_covers_the_sentinels_and_the_master(certificate):
    url = f"rediss+sentinel://me:pass%2Fword@127.0.0.1:1,h:2/service/3?ssl_ca_certs={certificate[0]}"
    with connect(f"{url}&sentinel_password=other") as client:
        pool = client.connection_pool
        guards = [guard.connection_pool for guard in pool.sentinel_manager.sentinels]
        assert [(guard.connection_kwargs["host"], guard.connection_kwargs["port"]) for guard in guards] == [
            ("127.0.0.1", 1),
            ("h", 2),
        ]
        master, guard = pool.make_connection(), guards[0].make_connection()
        for connection in (master, guard):
            assert isinstance(connection, SSLConnection)
            assert connection.ca_certs == str(certificate[0])
        assert (master.username, master.password, master.db) == ("me", "pass/word", 3)
        assert guard.password == "other"


def test_redis_cluster_is_refused(tmp_path):
    with run(tmp_path, 'save ""', "cluster-enabled yes", f"requirepass {PASSWORD}") as port:
        settings = Settings(redis_url=f"redis://:{PASSWORD}@127.0.0.1:{port}/0")
        with pytest.raises(
            RedisSetupError, match=r"^redis_url redis://127\.0\.0\.1:\d+/0: Redis Cluster is not supported; "
        ):
            open_redis(settings)


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1", "redis+sentinel://127.0.0.1:1,/service"])
def test_sentinel_url_without_service_or_address_is_refused(url):
    with pytest.raises(RedisSetupError, match=r"^redis_url: not a Redis URL"):
        open_redis(Settings(redis_url=url))
