"""Users of Redis with the limited rights that docs/machines.md lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis
from redis.exceptions import NoPermissionError

from osd.capture import exchange
from osd.capture.purge import Member, PurgeFollower, Purges, RemovedData
from osd.capture.writer import StreamWriter, TraceWriter
from osd.config import Settings
from osd.learning.record_worth import RecordWorth
from osd.recall.backends import backend
from osd.redis_client import connect
from osd.registry.replica_loads import DomainWork, ReplicaLoad, ReplicaLoads, UpstreamReport
from osd.registry.training import Training, TrainingReports
from osd.vllm.sharing import Sharing
from tests.integration.test_redis_deployments import use_everything
from tests.redis_servers import PASSWORD, acl_rules
from tests.replicas import Replicas, decode
from tests.unit.test_labelling import exchange as make_exchange


@pytest.fixture
def users(redis_url: str, redis_client: redis.Redis) -> Iterator[Callable[[str], str]]:
    """Function that returns the URL of a user; at the end, Redis must not have refused any command."""
    redis_client.execute_command("ACL LOG RESET")
    for name in ("osd", "traces", "ray"):
        redis_client.execute_command("ACL SETUSER", name, "reset", "on", f">{PASSWORD}", *acl_rules(name))
    yield lambda name: f"redis://{name}:{PASSWORD}@{redis_url.rpartition('@')[2]}"
    # Before a connection is used, its client names itself to the server, which Redis 6 does not know.
    refused = [entry for entry in redis_client.execute_command("ACL LOG") if entry["object"] != "client"]
    redis_client.execute_command("ACL DELUSER", "osd", "traces", "ray")
    assert refused == []


def test_rights_of_traces_suffice_for_taps_and_vllm(users, redis_client, make_trace, eventually):
    url, settings = users("traces"), Settings(capture={"service_bytes_per_second": 1 << 20})
    with TrainingReports(users("osd")) as reports:
        reports.set("general", Training(states_wanted=0.5))
    with closing(StreamWriter(url, settings.tapped, exchange.encode, "exchanges")) as writer:
        writer.offer(make_exchange("a b"))
        eventually(lambda: writer.counters()["written"] == 1)
    worth = RecordWorth(TrainingReports(url), settings.trainer)
    with closing(worth), closing(TraceWriter(url, settings.capture, "vllm-1", worth)) as writer:
        for number in range(40):
            writer.offer(make_trace(f"r{number}"))
        eventually(lambda: writer.counters()["written"] + writer.losses().get("budget", 0) == 40)
        assert writer.counters()["written"] > 0
    kernels = backend()
    first, second = kernels.memory(4096), kernels.memory(4096)
    with closing(Sharing(url, "m", 1000, first, kernels)) as one, closing(Sharing(url, "m", 1000, second, kernels)):
        one.share(1, [5, 6, 7, 8], [9])
        eventually(lambda: second.used())
    follower = PurgeFollower(Purges(url), Member("replica", "vllm-1"), lambda request, at: RemovedData())
    with Purges(users("osd")) as purges, closing(follower):
        purges.add("r1")
        follower.alive()
        follower.update()
        assert purges.answers("r1").keys() == {Member("replica", "vllm-1")}
    with ReplicaLoads(url) as loads, ReplicaLoads(users("osd")) as seen:
        loads.report("vllm 1", ReplicaLoad(1, 0, 1, 1.0), {"general": DomainWork(1.0)})
        loads.report_upstream("vllm 1", UpstreamReport(1.0, "general"))
        assert (seen.read().keys(), seen.work().keys(), seen.upstreams().keys()) == ({"vllm 1"},) * 3


def test_rights_of_osd_suffice_for_a_service_and_a_trainer(users, make_loop, tiny_target, tmp_path, eventually):
    url = users("osd")
    use_everything(url, "r", tmp_path / "everything")
    settings = Settings(
        home=tmp_path / "home",
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "recall", "recall": {"megabytes": 1}},
        engine={"slots": 2, "context": 256, "threads": 1, "max_draft": 24},
        serving={"replicas": 2},
    )
    with Replicas(settings, url) as replicas:
        first, second = replicas.start("first"), replicas.start("second")
        decode(first, "chatcmpl-1f-0")()
        eventually(lambda: second.engine.pool.memories("general").of("").used())
    worker = make_loop(url=url).begin()
    eventually(lambda: worker.status()["published"] >= 1)


@pytest.mark.parametrize(("user", "command"), [
    ("traces", ["SET", "osd:rollout:general", "x"]),
    ("traces", ["XREVRANGE", "osd:events", "+", "-"]),
    ("traces", ["HGETALL", "RAYosd@KV"]),
    ("osd", ["HGETALL", "RAYosd@KV"]),
    ("osd", ["FLUSHALL"]),
    ("ray", ["XREVRANGE", "osd:traces:domain:general", "+", "-"]),
    ("ray", ["CONFIG", "GET", "requirepass"]),
])  # fmt: skip
def test_other_keys_and_commands_are_refused(users, redis_client, user, command):
    with connect(users(user)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)
    redis_client.execute_command("ACL LOG RESET")
