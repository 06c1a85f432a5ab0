"""Who may train a domain, and which version a rollout gives a request."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from osd.learning.replay import is_held_out
from osd.registry import lease as module
from osd.registry.lease import Lease
from osd.registry.pointer import MoveNews
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout
from tests.pointers import write

ROOT = Path(module.__file__).parents[2]
ROLLOUT = Rollout(1, None, 0.0, 1.0)


@pytest.fixture
def files(tmp_path: Path) -> PointerFiles:
    made = PointerFiles(tmp_path)
    write(made, "general", ROLLOUT)
    return made


@pytest.fixture
def make(files: PointerFiles, ends: ExitStack):
    def lease(*lives: Callable[[], bool | None]) -> Lease:
        made = Lease(files, "general", *lives)
        ends.callback(made.release)
        return made

    return lease


def fence_of(files: PointerFiles) -> int:
    rollout = files.read("general")
    return rollout.fence


def test_one_trainer_has_a_domain_and_the_next_waits_until_it_ends(make, files):
    first, second = make(), make()
    assert first.take(ROLLOUT)
    assert first.take(ROLLOUT)
    assert not second.take(ROLLOUT)
    first.release()
    assert second.take(ROLLOUT)
    assert (first.fence, second.fence, fence_of(files)) == (1, 2, 2)


def test_refused_lease_leaves_no_file_open(make):
    holder, refused = make(), make()
    assert holder.take(ROLLOUT)
    assert not refused.take(ROLLOUT)
    before = len(os.listdir("/proc/self/fd"))
    assert not any(refused.take(ROLLOUT) for _ in range(20))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_trainer_that_is_killed_leaves_the_domain_at_once(make, files):
    code = (
        "import os, sys; from pathlib import Path; from osd.registry.lease import *\n"
        "lease = Lease(PointerFiles(Path(sys.argv[1])), 'general')\n"
        "assert lease.take(Rollout(1, None, 0.0, 1.0)); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(files.storage.local)], cwd=ROOT, check=False)
    assert killed.returncode == -9
    mine = make()
    assert mine.take(ROLLOUT)
    assert mine.fence == 2


def test_a_trainer_that_has_been_silent_is_replaced_and_can_write_nothing_when_it_comes_back(make, monkeypatch):
    silent, next_one = make(), make()
    assert silent.take(ROLLOUT)
    assert not next_one.take(ROLLOUT)
    monkeypatch.setattr(module, "SILENT_SECONDS", -1.0)
    assert next_one.take(ROLLOUT)
    with next_one.held():
        pass
    with pytest.raises(FencedError, match=r"^another trainer has taken over general: [^\n]*$"), silent.held():
        pytest.fail("it wrote")
    now = module.time.monotonic() + 2  # it speaks once a second
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for refused in (silent.alive, lambda: silent.take(ROLLOUT)):
        with pytest.raises(FencedError):
            refused()


def test_one_that_is_known_to_be_gone_need_not_be_silent_for_long(make, monkeypatch):
    now, lives = 1000.0, None
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    silent, next_one = make(), make(lambda: lives)
    assert silent.take(ROLLOUT)
    for _ in range(20):  # two looks a second
        assert not next_one.take(ROLLOUT)
        now += 0.5
    lives = False
    assert next_one.take(ROLLOUT)
    other = make(lambda: False)
    for _ in range(20):  # who is gone only for whoever says so speaks, and keeps it
        next_one.alive()
        assert not other.take(ROLLOUT)
        now += 0.5


def test_where_a_trainer_has_other_files_its_word_keeps_the_next_one_waiting_until_it_has_been_silent(make):
    lives: bool | None = True
    mine = make(lambda: lives)
    assert not mine.take(ROLLOUT)  # though the lock is free here
    lives = False
    assert mine.take(ROLLOUT)


def test_a_trainer_that_speaks_is_not_replaced_however_long_it_has_the_domain(make, files, monkeypatch):
    first, second, lock = make(), make(), files.storage.local / ".general.trainer"
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert first.take(ROLLOUT)
    for _ in range(100):
        now += 30.0
        before = os.stat(lock).st_mtime_ns
        os.utime(lock, ns=(before - 10**9, before - 10**9))  # time that passes on the disk's clock
        first.alive()
        assert not second.take(ROLLOUT)
    now += 61.0
    assert second.take(ROLLOUT)


def test_taking_over_moves_no_pointer(make, files):
    assert make().take(ROLLOUT)
    assert files.read("general") == Rollout(1, None, 0.0, 1.0, fence=1)


def test_a_domain_with_nothing_on_disk_begins_with_what_the_pointer_says(tmp_path):
    files = PointerFiles(tmp_path / "registry")
    lease = Lease(files, "general")
    assert lease.take(Rollout(3, None, 0.0, 1.0, moves=4))
    assert files.read("general") == Rollout(3, None, 0.0, 1.0, moves=4, fence=1)
    lease.release()


def test_a_lost_subscription_to_moves_is_made_again():
    channel = Mock()
    channel.get_message.side_effect = ConnectionError("lost")
    with MoveNews(Mock(pubsub=Mock(return_value=channel))) as news:
        for _ in range(3):
            news.wait(threading.Event(), 0.0)
    assert channel.subscribe.call_count == 2


IDS = [f"cmpl-{i:032x}-0" for i in range(20_000)]


def test_without_a_canary_every_request_gets_the_stable_version():
    assert {Rollout(4, None, 0.5, 1.0).version_for(name) for name in IDS[:500]} == {4}


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_the_canary_gets_its_share_of_requests(share):
    got = sum(Rollout(4, 5, share, 1.0).version_for(name) == 5 for name in IDS)
    assert abs(got - share * len(IDS)) <= 4 * math.sqrt(len(IDS) * share * (1 - share))


def test_a_request_gets_the_same_version_everywhere_and_keeps_it_while_the_share_grows():
    small, large = ({n for n in IDS if Rollout(4, 5, share, 1.0).version_for(n) == 5} for share in (0.1, 0.4))
    assert small < large
    # Worked out once: another hash or salt would send requests elsewhere than replicas of another build do.
    assert [Rollout(1, 2, 0.5, 1.0).version_for(name) for name in ("a", "b", "c", "d", "e", "f")] == [2, 2, 2, 1, 1, 1]


def test_what_the_canary_serves_does_not_depend_on_what_is_held_out():
    held_out = [name for name in IDS if is_held_out(name, 0.3)]
    got = sum(Rollout(4, 5, 0.3, 1.0).version_for(name) == 5 for name in held_out)
    assert abs(got - 0.3 * len(held_out)) <= 4 * math.sqrt(len(held_out) * 0.3 * 0.7)
