"""Two trainers of one domain at once: the one that was silent has lost it, and changes nothing when it comes back."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from osd.capture.server import RedisServer
from osd.registry.pointer_file import PointerFiles
from tests.faults.test_trainer_dies_writing import prepare_with_old
from tests.integration.test_trainer_killed import check_whole
from tests.killer import Killer
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "a trainer hangs while it writes, another one takes over, and the first goes on",
        "the first ends with a line that says so, and changes no version, pointer, checkpoint, ledger or event",
    ),
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> Iterator[tuple[RedisServer, Killer, Killer, list[str]]]:
    first, second = Killer("tests.faults.dying_trainer"), Killer("tests.faults.dying_trainer")
    with RedisServer(128) as server:
        home = tmp_path_factory.mktemp("whole")
        prepare_with_old(server.url, home)
        yield server, first, second, second.run(server.url, home, signal=0, before="")["writes"]
    first.close()
    second.close()


def state(client: redis.Redis, home: Path) -> dict[str, Any]:
    """What is on disk but for locks and parts, and what Redis has of it and of the ledger."""
    paths = sorted(path for path in home.rglob("[!.]*") if path.is_file())
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    kept = {name: client.dump(name) for name in ("osd:rollout:general", "osd:ledger:general", "osd:events")}
    return {**files, **kept, "pending": client.xinfo_groups("osd:traces:domain:general")[0]["pending"]}


def stopped(parent: int) -> psutil.Process:
    """The trainer that stopped itself."""
    children = psutil.Process(parent).children
    return wait_until(lambda: next((one for one in children() if one.status() == psutil.STATUS_STOPPED), None))


@pytest.mark.parametrize(
    ("what", "where"),
    [("fsync", "checkpoint.py"), ("fsync", "versions.py"), ("os.mkdir", "versions.py"), ("XACK", "reader.py")],
    ids=["a checkpoint", "an intention", "a version", "acknowledgements"],
)
def test_a_trainer_that_hung_while_it_wrote_ends_and_changes_nothing(trainers, tmp_path, aftermath, what, where):
    server, first, second, places = trainers
    before = next(place for place in places if place.startswith(what) and where in place)
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        registry, answers = prepare_with_old(server.url, tmp_path), []
        hanging = threading.Thread(
            target=lambda: answers.append(first.run(server.url, tmp_path, signal=int(signal.SIGSTOP), before=before))
        )
        hanging.start()
        victim = stopped(first.process.pid)
        begun = time.monotonic()
        try:
            successor = second.run(server.url, tmp_path, signal=0, before="")
            aftermath.seconds = time.monotonic() - begun
            assert not successor["lost"]
            assert PointerFiles(registry.root).read("general").fence == 2
            whole = state(client, tmp_path)
        finally:
            victim.resume()
            hanging.join(20)
        assert state(client, tmp_path) == whole
    ((_, _, lost),) = [answer.values() for answer in answers]
    assert lost == "another trainer has taken over general: it is number 2, this one 1, which ends"
    check_whole(server.url, tmp_path, registry)
    aftermath.lost, aftermath.errors = "nothing", "none: replicas go on with what they have"
