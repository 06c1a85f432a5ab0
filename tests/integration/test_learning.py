"""Learning without serving: from what a tap captured to a version in service, on a real Redis."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from deploy.assembly import StartError
from deploy.learning import Learning, check_learning
from osd.admin.audit import Actor
from osd.admin.forgetting import forget
from osd.capture import exchange
from osd.capture.purge import Purges
from osd.capture.trace import FIELD, decode
from osd.capture.writer import StreamWriter
from osd.config import ConfigError, Settings
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry
from osd.running import find, lock
from tests.redis_servers import free_port
from tests.tiny import VOCABULARY
from tests.unit.test_labelling import chat
from tests.unit.test_labelling import exchange as made
from tests.waiting import background
from trainer.teacher import Labelled, Teacher


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path, redis_url: str) -> Settings:
    return Settings(
        home=tmp_path,
        redis_url=redis_url,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "eagle", "vocabulary": VOCABULARY},
        tap={"dashboard_port": free_port()},
        trainer={
            "min_records": 6,
            "held_out": 0.3,
            "steps_per_candidate": 20,
            "micro_batch_tokens": 96,
            "update_tokens": 64,
            "learning_rate": 0.01,
            "tracking": "none",
        },
    )


@pytest.fixture
def send(settings: Settings, ends: ExitStack) -> Callable[..., None]:
    writer = StreamWriter(settings.redis_url, settings.tapped, exchange.encode, "exchanges")
    ends.callback(writer.close)

    def sent(number: int, **changed: Any) -> None:
        text = f"{number % 3} and again {number % 3} and again "
        turns = chat([{"role": "user", "content": text}])
        fields = {"request_id": f"chatcmpl-{number}-0", "target": settings.target.source, **turns, **changed}
        writer.offer(made(text * 2, **fields))

    return sent


def traces(client: redis.Redis) -> list[Any]:
    return [decode(fields[FIELD]) for _, fields in client.xrange("osd:traces:domain:general")]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_drafter_learns_what_others_answered_though_who_reads_it_ends(
    settings, send, redis_client, eventually, killed
):
    with Learning(settings) as learning:
        assert find(settings.home_dir).redis_url == settings.redis_url
        with Pointer(learning.redis_url, settings.registry_dir) as pointer:
            assert pointer.get("general").stable == 1
            for number in range(40):
                send(number)
            eventually(lambda: learning.teacher.counts.read > 0)
            if killed:
                os.kill(learning.teacher.pid, signal.SIGKILL)
            eventually(lambda: learning.check() or len({one.request_id for one in traces(redis_client)}) == 40)
            eventually(lambda: pointer.get("general").stable > 1)
    assert find(settings.home_dir) is None
    gate = Registry(settings.registry_dir).load("general", 2).manifest["gate"]
    assert gate["acceptance"] > gate["baseline_acceptance"]
    found = traces(redis_client)
    assert {trace.request_id for trace in found} == {f"chatcmpl-{number}-0" for number in range(40)}
    assert all(np.isfinite(trace.target_logp.numpy()).all() for trace in found)
    group = redis_client.xinfo_groups("osd:tapped:domain:general")[0]
    newest, _ = redis_client.xrevrange("osd:tapped:domain:general", count=1)[0]
    assert (group["pending"], group["last-delivered-id"]) == (0, newest)


def test_what_is_no_exchange_of_the_target_is_left_out_and_the_rest_goes_on(settings, send, redis_client, eventually):
    over, told = threading.Event(), [Labelled()]
    teacher = Teacher(settings, settings.redis_url, Path(settings.target.source), (1,), over, told.append)
    with background(teacher.run, over.set):
        send(0, target="another")
        send(1, chat=b"{}")
        redis_client.xadd("osd:tapped:domain:general", {FIELD: b"junk"})
        with Purges(settings.redis_url) as purges:
            purges.ask("chatcmpl-2")
        send(2)
        send(3)
        eventually(lambda: told[-1] == Labelled(read=4, refused=3, traces=1))
        assert [trace.request_id for trace in traces(redis_client)] == ["chatcmpl-3-0"]
        found = forget(settings, settings.redis_url, Actor.local(), "chatcmpl-3")
        assert found.streamed == 2
    left = [
        exchange.decode(fields[FIELD])
        for _, fields in redis_client.xrange("osd:tapped:domain:general")
        if b"junk" not in fields[FIELD]
    ]
    assert {one.request_id for one in left} == {"chatcmpl-0-0", "chatcmpl-1-0"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"trainer": {"enabled": False}}, "trainer.enabled"),
        ({"drafter": {"kind": "none"}}, "drafter.kind"),
        ({"trainer": {"positions": "rejected"}}, "trainer.positions"),
        ({"trainer": {"samples": "student"}}, "trainer.samples"),
        ({"trainer": {"workers": 2}}, "trainer.workers"),
        ({"trainer": {"processes": 2}}, "trainer.processes"),
        ({"trainer": {"extra_domains": "sql"}}, "trainer.extra_domains"),
    ],
)
def test_settings_with_which_nothing_can_be_learnt_are_refused_by_name(changed, named):
    with pytest.raises(ConfigError, match=named):
        check_learning(Settings(**changed))


def test_a_home_that_is_in_use_is_refused(settings):
    with lock(settings.home_dir), pytest.raises(StartError, match="already runs"):
        Learning(settings).start()
