"""Learning without serving: from what a tap captured to a version in service, on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from deploy.embedded import StartError
from deploy.learning import Learning, check_learning
from deploy.running import find
from osd.admin.audit import Actor
from osd.admin.forgetting import forget
from osd.capture import exchange
from osd.capture.purge import Purges
from osd.capture.stream import StreamWriter
from osd.capture.trace import FIELD, decode
from osd.config import ConfigError, Settings
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry
from tests.tiny import VOCABULARY
from tests.unit.test_labelling import chat
from tests.unit.test_labelling import exchange as made


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path, redis_url: str) -> Settings:
    return Settings(
        home=tmp_path,
        redis_url=redis_url,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "eagle", "vocabulary": VOCABULARY},
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
def send(settings: Settings) -> Iterator[Callable[..., None]]:
    writer = StreamWriter(settings.redis_url, settings.tapped, exchange.encode, "exchanges")

    def sent(number: int, **changed: Any) -> None:
        text = f"{number % 3} and again {number % 3} and again "
        turns = chat([{"role": "user", "content": text}])
        fields = {"request_id": f"chatcmpl-{number}-0", "target": settings.target.source, **turns, **changed}
        writer.offer(made(text * 2, **fields))

    yield sent
    writer.close()


def traces(client: redis.Redis) -> list[Any]:
    return [decode(fields[FIELD]) for _, fields in client.xrange("osd:traces")]


def test_a_drafter_learns_what_another_server_answered(settings, send, redis_client, eventually):
    with Learning(settings) as learning:
        assert find(settings.home_dir).redis_url == settings.redis_url
        with Pointer(learning.redis_url, settings.registry_dir) as pointer:
            assert pointer.get("general").stable == 1
            for number in range(40):
                send(number)
            eventually(lambda: learning.teacher.counts.read == 40)
            eventually(lambda: pointer.get("general").stable > 1, 30)
        learning.check()
    assert find(settings.home_dir) is None
    gate = Registry(settings.registry_dir).load("general", 2).manifest["gate"]
    assert gate["acceptance"] > gate["baseline_acceptance"]
    found = traces(redis_client)
    assert {trace.request_id for trace in found} == {f"chatcmpl-{number}-0" for number in range(40)}
    assert all(np.isfinite(trace.target_logp.numpy()).all() for trace in found)
    group = redis_client.xinfo_groups("osd:tapped")[0]
    newest, _ = redis_client.xrevrange("osd:tapped", count=1)[0]
    assert (group["pending"], group["last-delivered-id"]) == (0, newest)


def test_what_is_no_exchange_of_the_target_is_left_out_and_the_rest_goes_on(settings, send, redis_client, eventually):
    with Learning(settings) as learning:
        send(0, target="another")
        send(1, chat=b"{}")
        redis_client.xadd("osd:tapped", {FIELD: b"junk"})
        with Purges(settings.redis_url) as purges:
            purges.ask("chatcmpl-2")
        send(2)
        send(3)
        eventually(lambda: learning.teacher.counts.read == 4)
        assert learning.teacher.counts.refused == 3
        assert [trace.request_id for trace in traces(redis_client)] == ["chatcmpl-3-0"]
        found = forget(settings, settings.redis_url, Actor.local(), "chatcmpl-3")
        assert found.streamed == 2
    left = [
        exchange.decode(fields[FIELD])
        for _, fields in redis_client.xrange("osd:tapped")
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
        ({"trainer": {"extra_domains": "sql"}}, "trainer.extra_domains"),
    ],
)
def test_settings_with_which_nothing_can_be_learnt_are_refused_by_name(changed, named):
    with pytest.raises(ConfigError, match=named):
        check_learning(Settings(**changed))


def test_a_home_that_is_in_use_is_refused(settings):
    with Learning(settings):
        second = Learning(settings)
        with pytest.raises(StartError, match="already runs"):
            second.start()
