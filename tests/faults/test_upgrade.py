"""A home and a Redis that earlier code left are taken up by this one, with traffic during the switch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch

from osd.capture.retention import Retention
from osd.capture.server import RedisServer
from osd.capture.trace import FIELD, Trace, encode
from osd.drafters.recall.snapshot import SnapshotError, Snapshots
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.learning.online import Learner, Local, empty_replay
from osd.recall.backends import backend
from osd.registry.ledger import Ledger
from osd.registry.pointer import Rollout
from osd.target.identity import Identity
from tests.integration.loop import Loop
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from trainer import checkpoint

pytestmark = [
    pytest.mark.fault(
        "new code takes up what earlier code left on disk and in Redis, while requests are served",
        "what is old is read, or refused by name; no version, record, checkpoint or second of the ledger is lost",
    ),
]

RECORDS = 12


class EarlierRollout(msgspec.Struct, frozen=True):
    """The pointer before it was on disk: replicas of that time read no more of it."""

    stable: int
    canary: int | None
    share: float
    changed: float


class EarlierSpent(msgspec.Struct, frozen=True):
    """The ledger before versions were removed."""

    by_version: dict[int, float] = {}
    unpublished: float = 0.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(64) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def first_format(trace: Trace) -> bytes:
    """A record as it was written when it had no number: of its segment another name, and no word of who drafted."""
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(trace))
    for name in ("format", "sources", "source", "replica"):
        del fields[name]
    fields["piece"] = fields.pop("segment")
    return msgspec.msgpack.encode(fields)


def leave_checkpoint(loop: Loop) -> int:
    """A checkpoint that knows of no requests, versions or seconds; returns its steps."""
    settings = loop.settings.trainer
    learner = Learner(Distiller(Toy(), settings), settings, Gate(3, "forward_kl"), VOCABULARY, empty_replay(settings))
    for number in range(6):
        learner.add(make_trace(f"earlier-{number}", completion=30, seed=100 + number))
    learner.step(64, Local())
    tensors, state = learner.state()
    path = loop.settings.home_dir / "trainer" / "general.safetensors"
    checkpoint.save(path, tensors, {**state, "config": {"kind": "toy"}, "target": "toy"})
    return learner.distiller.steps


@pytest.fixture
def earlier(server: RedisServer, client: redis.Redis, tmp_path: Path) -> Iterator[Loop]:
    """What earlier code left: two versions with the first in service, records, a ledger."""
    loop = Loop(server.url, tmp_path, tracking="none")
    torch.manual_seed(0)
    for _ in range(2):
        loop.registry.publish("general", Toy().weights(), Toy().config(), {})
    client.sadd("osd:domains", "general")
    client.set("osd:rollout:general", msgspec.json.encode(EarlierRollout(1, None, 0.0, 5.0)))
    client.set("osd:ledger:general", msgspec.json.encode(EarlierSpent({2: 7.5}, 1.25)))
    for number in range(RECORDS):
        client.xadd(
            "osd:traces",
            {FIELD: first_format(make_trace(f"old-{number}", completion=30, seed=number, target="toy"))},
        )
    yield loop
    loop.close()


@pytest.mark.parametrize("on_disk", [False, True], ids=["pointer in Redis", "pointer kept for the next start"])
def test_a_trainer_goes_on_from_an_earlier_pointer_checkpoint_ledger_and_stream(
    earlier, server, client, eventually, on_disk, aftermath
):
    loop, began = earlier, time.monotonic()
    if on_disk:
        kept = msgspec.json.encode(EarlierRollout(1, None, 0.0, 5.0))
        (loop.registry.root / "general.rollout.json").write_bytes(kept)
        client.delete("osd:rollout:general", "osd:domains")
    steps = leave_checkpoint(loop)
    assert loop.pointer.repair("general").stable == 1
    worker = loop.start()
    loop.send(30)  # requests go on
    eventually(lambda: worker.status()["published"] > 0, seconds=30)
    aftermath.seconds = time.monotonic() - began
    eventually(lambda: worker.intake.waiting().records == 0, seconds=30)
    status = worker.status()
    loop.stop()
    assert client.xlen("osd:traces") == RECORDS, "nothing is written to the stream of earlier code"
    Retention(client, loop.settings.capture).enforce(time.time())
    assert not client.exists("osd:traces"), "it goes when its trainer has read it to its end"
    assert status["steps"] > steps, "it went on from the checkpoint"
    assert status["refused"] == 0
    assert status["trained"] + status["held_out"] >= RECORDS + 30
    with Ledger(server.url) as ledger:
        spent = ledger.get("general")
        assert spent.total > 8.75
        # Whoever reads it with earlier code sees the versions that it knows.
        assert msgspec.json.decode(client.get("osd:ledger:general"), type=EarlierSpent).by_version[3] >= 1.25
    moved = loop.pointer.get("general")
    assert moved.stable > 2
    seen = msgspec.json.decode(client.get("osd:rollout:general"), type=EarlierRollout)
    assert (seen.stable, seen.canary) == (moved.stable, None), "earlier replicas follow it"
    aftermath.lost, aftermath.errors = "nothing", "none"


def test_a_canary_of_earlier_code_is_decided_on(earlier, server, client, eventually, aftermath):
    client.set("osd:rollout:general", msgspec.json.encode(EarlierRollout(1, 2, 0.25, time.time() - 10_000)))
    worker = earlier.start()
    eventually(lambda: worker.status()["version"] == 1)
    eventually(lambda: earlier.pointer.get("general").canary is None, seconds=30)
    eventually(lambda: any(event["kind"] == "rolled_back" for event in earlier.events.recent()))
    aftermath.lost = "nothing"


def test_a_pointer_that_only_redis_has_outlives_it(earlier, client, tmp_path, aftermath):
    assert earlier.pointer.repair("general") == Rollout(1, None, 0.0, 5.0, moves=1)
    client.flushall()
    assert earlier.pointer.get("general").stable == 1
    aftermath.lost = "nothing"


def test_a_snapshot_of_an_earlier_format_is_refused_by_name_and_stays_until_the_next(tmp_path, aftermath):
    memory, snapshots, target = backend().memory(64), Snapshots(tmp_path), Identity("target", "a" * 64, "b" * 64)
    snapshots.write("general", memory, target)
    file = tmp_path / "general" / "recall.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["format"] = "1"
    file.write_bytes(data[:8] + json.dumps(header).encode().ljust(size) + data[8 + size :])
    with pytest.raises(SnapshotError, match=r"^it is of format 1, and only 2 is known$"):
        snapshots.restore("general", memory, target)
    assert file.exists()
    aftermath.lost = "what was recalled in a format that is not known any more"
