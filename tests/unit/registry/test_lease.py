"""Lease of a trainer on a domain, and the version that a rollout chooses for a request."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from osd.registry import lease as module
from osd.registry.lease import Lease
from osd.registry.pointer import MoveSubscription
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout
from tests.pointers import write

ROOT = Path(module.__file__).parents[2]
ROLLOUT = Rollout(1, None, 0.0, 1.0)


@pytest.fixture
def files(tmp_path: Path) -> PointerFiles:
    pointers = PointerFiles(tmp_path)
    write(pointers, "general", ROLLOUT)
    return pointers


@pytest.fixture
def make(files: PointerFiles, ends: ExitStack):
    def make_lease(*has_other_trainer: Callable[[], bool | None]) -> Lease:
        lease = Lease(files, "general", *has_other_trainer)
        ends.callback(lease.release)
        return lease

    return make_lease


def test_second_lease_waits_until_the_first_is_released(make, files):
    first, second = make(), make()
    assert first.take(ROLLOUT)
    assert first.take(ROLLOUT)
    assert not second.take(ROLLOUT)
    first.release()
    assert second.take(ROLLOUT)
    assert (first.fence, second.fence, files.read("general").fence) == (1, 2, 2)


def test_refused_lease_leaves_no_file_open(make):
    holder, refused = make(), make()
    assert holder.take(ROLLOUT)
    assert not refused.take(ROLLOUT)
    before = len(os.listdir("/proc/self/fd"))
    assert not any(refused.take(ROLLOUT) for _ in range(20))
    assert len(os.listdir("/proc/self/fd")) == before


def test_lease_of_a_killed_trainer_is_free_at_once(make, files):
    code = (
        "import os, sys; from pathlib import Path; from osd.registry.lease import *\n"
        "lease = Lease(PointerFiles(Path(sys.argv[1])), 'general')\n"
        "assert lease.take(Rollout(1, None, 0.0, 1.0)); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(files.storage.local)], cwd=ROOT, check=False)
    assert killed.returncode == -9
    lease = make()
    assert lease.take(ROLLOUT)
    assert lease.fence == 2


def test_silent_holder_loses_the_lease_and_cannot_write(make, monkeypatch):
    silent, successor = make(), make()
    assert silent.take(ROLLOUT)
    assert not successor.take(ROLLOUT)
    monkeypatch.setattr(module, "SILENT_SECONDS", -1.0)
    assert successor.take(ROLLOUT)
    with successor.held():
        pass
    with pytest.raises(FencedError, match=r"^another trainer has taken over general: [^\n]*$"), silent.held():
        pytest.fail("the fenced trainer could write")
    now = module.time.monotonic() + 2  # a heartbeat is sent once a second
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for refused in (silent.alive, lambda: silent.take(ROLLOUT)):
        with pytest.raises(FencedError):
            refused()


def test_holder_known_to_be_dead_is_replaced_sooner(make, monkeypatch):
    now, is_alive = 1000.0, None
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    silent, successor = make(), make(lambda: is_alive)
    assert silent.take(ROLLOUT)
    for _ in range(20):  # two attempts a second
        assert not successor.take(ROLLOUT)
        now += 0.5
    is_alive = False
    assert successor.take(ROLLOUT)
    other = make(lambda: False)
    for _ in range(20):  # the holder sends heartbeats, so it keeps the lease though it is reported dead
        successor.alive()
        assert not other.take(ROLLOUT)
        now += 0.5


def test_lease_waits_for_a_live_trainer_on_other_files(make):
    is_alive: bool | None = True
    lease = make(lambda: is_alive)
    assert not lease.take(ROLLOUT)  # though the lock on this machine is free
    is_alive = False
    assert lease.take(ROLLOUT)


def test_holder_with_a_heartbeat_keeps_the_lease(make, files, monkeypatch):
    first, second, lock = make(), make(), files.storage.local / ".general.trainer"
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert first.take(ROLLOUT)
    for _ in range(100):
        now += 30.0
        before = os.stat(lock).st_mtime_ns
        os.utime(lock, ns=(before - 10**9, before - 10**9))  # time passes on the clock of the disk
        first.alive()
        assert not second.take(ROLLOUT)
    now += 61.0
    assert second.take(ROLLOUT)


def test_takeover_changes_only_the_fence_of_the_rollout(make, files):
    assert make().take(ROLLOUT)
    assert files.read("general") == Rollout(1, None, 0.0, 1.0, fence=1)


def test_first_lease_writes_the_given_rollout_to_disk(tmp_path):
    files = PointerFiles(tmp_path / "registry")
    lease = Lease(files, "general")
    assert lease.take(Rollout(3, None, 0.0, 1.0, moves=4))
    assert files.read("general") == Rollout(3, None, 0.0, 1.0, moves=4, fence=1)
    lease.release()


def test_move_subscription_is_renewed_after_an_error():
    channel = Mock()
    channel.get_message.side_effect = ConnectionError("lost")
    with MoveSubscription(Mock(pubsub=Mock(return_value=channel))) as news:
        for _ in range(3):
            news.wait(threading.Event(), 0.0)
    assert channel.subscribe.call_count == 2
