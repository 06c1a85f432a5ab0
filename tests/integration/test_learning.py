"""Learning without serving: from captured exchanges to a version in service, on a real Redis."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from deploy.assembly import StartError
from deploy.learning import Learning, check_learning
from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.capture import exchange
from osd.capture.exchange import FunctionCall
from osd.capture.purge import Purges
from osd.capture.trace import ACCEPTED, FIELD, REJECTED, decode
from osd.capture.writer import StreamWriter, TraceWriter
from osd.cli.exit_codes import INTERRUPTED
from osd.config import CaptureSettings, ConfigError, Settings
from osd.drafting import from_config
from osd.labelling.labeller import Labeller
from osd.labelling.rendering import Reading
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry
from osd.running import find, lock
from osd.runtime.model import SlotModel
from osd.target.identity import identify
from osd.target.model import load_model
from tests.command import osd, run_cli
from tests.redis_servers import free_port
from tests.tiny import VOCABULARY
from tests.unit.learning.toys import with_drafts
from tests.unit.test_labelling import chat
from tests.unit.test_labelling import exchange as make_exchange
from tests.waiting import HANG_SECONDS, background, wait_until
from trainer.teacher import LabellingCounts, Teacher


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path, redis_url: str) -> Settings:
    return Settings(
        home=tmp_path,
        redis_url=redis_url,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "eagle", "vocabulary": VOCABULARY},
        tap={"dashboard_port": free_port()},
        trainer={
            "min_records": 6, "held_out": 0.3, "steps_per_candidate": 20, "micro_batch_tokens": 96, "update_tokens": 64,
            "learning_rate": 0.01, "tracking": "none",
        },
    )  # fmt: skip


@pytest.fixture
def send(settings: Settings, ends: ExitStack) -> Callable[..., None]:
    writer = StreamWriter(settings.redis_url, settings.tapped, exchange.encode, "exchanges")
    ends.callback(writer.close)

    def send(number: int, **changed: Any) -> None:
        text = f"{number % 3} and again {number % 3} and again "
        turns = chat([{"role": "user", "content": text}])
        fields = {"request_id": f"chatcmpl-{number}-0", "target": settings.target.source, **turns, **changed}
        writer.offer(make_exchange(text * 2, **fields))

    return send


def traces(client: redis.Redis) -> list[Any]:
    return [decode(fields[FIELD]) for _, fields in client.xrange("osd:traces:domain:general")]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_drafter_learns_from_exchanges_after_a_teacher_restart(settings, send, redis_client, eventually, killed):
    with Learning(settings) as learning:
        assert find(settings.home_dir).redis_url == settings.redis_url
        with Pointer(learning.redis_url, settings.registry_dir) as pointer:
            assert pointer.get("general").stable == 1
            for number in range(40):
                send(number)
            eventually(lambda: learning.teacher.counts.read > 0)
            if killed:
                os.kill(learning.teacher.pid, signal.SIGKILL)
            eventually(lambda: learning.check() or len({trace.request_id for trace in traces(redis_client)}) == 40)
            eventually(lambda: pointer.get("general").stable > 1)
    assert find(settings.home_dir) is None
    gate = Registry(settings.registry_dir).load("general", 2).manifest["gate"]
    assert gate["acceptance"] > gate["baseline_acceptance"]
    captured = traces(redis_client)
    assert {trace.request_id for trace in captured} == {f"chatcmpl-{number}-0" for number in range(40)}
    assert all(np.isfinite(trace.target_logp.numpy()).all() for trace in captured)
    group = redis_client.xinfo_groups("osd:tapped:domain:general")[0]
    newest, _ = redis_client.xrevrange("osd:tapped:domain:general", count=1)[0]
    assert (group["pending"], group["last-delivered-id"]) == (0, newest)


@pytest.mark.soak
def test_learn_command_offers_a_version_for_vllm_until_a_signal(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("OSD_REDIS_URL", settings.redis_url)  # it holds a password
    target, values = settings.target, settings.drafter
    options = {
        "target.source": target.source, "target.dtype": target.dtype,
        "drafter.kind": values.kind, "drafter.vocabulary": values.vocabulary,
        "tap.dashboard_port": settings.tap.dashboard_port,
    }  # fmt: skip
    arguments = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
    export = ["drafters", "export", "1", "--format", "speculators", "--out", tmp_path / "eagle", *arguments]
    with osd(tmp_path, "learn", "--capture", *arguments) as process:
        exported = wait_until(lambda: (done := run_cli(*export, home=tmp_path)).exit_code == 0 and done, every=0.5)
        assert '"method": "eagle3"' in exported.stdout
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == INTERRUPTED
    assert "Learning    from the traffic that a vLLM with OSD_VLLM_CAPTURE=1 captures" in errors


def test_teacher_skips_unsuitable_exchanges(settings, send, redis_client, eventually):
    stop, counts = threading.Event(), [LabellingCounts()]
    teacher = Teacher(settings, settings.redis_url, Path(settings.target.source), (1,), stop, counts.append)
    with background(teacher.run, stop.set):
        send(0, target="another")
        send(1, chat=b"{}")
        redis_client.xadd("osd:tapped:domain:general", {FIELD: b"junk"})
        with Purges(settings.redis_url) as purges:
            purges.add("chatcmpl-2")
        send(2)
        deep = FunctionCall("1", "f", "[" * 600 + "]" * 600)
        send(4, calls=(deep,))
        send(3)
        eventually(lambda: counts[-1] == LabellingCounts(read=5, refused=4, traces=1))
        kept = [fields for _, fields in redis_client.xrange("osd:tapped:refused")]
        assert exchange.decode(next(fields[FIELD] for fields in kept if fields[b"reason"] == b"ExchangeError"))
        assert len(kept) == 3, "another target, no chat, and the deep call; a purge removes junk"
        assert [trace.request_id for trace in traces(redis_client)] == ["chatcmpl-3-0"]
        result = purge_request(settings, settings.redis_url, Actor.local(), "chatcmpl-3")
        assert result.streamed == 2
    remaining = [
        exchange.decode(fields[FIELD])
        for _, fields in redis_client.xrange("osd:tapped:domain:general")
        if b"junk" not in fields[FIELD]
    ]
    assert {each.request_id for each in remaining} == {"chatcmpl-0-0", "chatcmpl-1-0", "chatcmpl-4-0"}


def test_traces_beyond_the_budget_are_acknowledged_too(settings, send, redis_client, eventually):
    settings = settings.model_copy(update={"capture": CaptureSettings(bytes_per_second=1024)})
    stop, counts = threading.Event(), [LabellingCounts()]
    teacher = Teacher(settings, settings.redis_url, Path(settings.target.source), (1,), stop, counts.append)
    for number in range(12):
        send(number)
    with background(teacher.run, stop.set):
        eventually(lambda: counts[-1] == LabellingCounts(read=12, refused=0, traces=12))
    assert len(traces(redis_client)) < 12
    assert redis_client.xinfo_groups("osd:tapped:domain:general")[0]["pending"] == 0


def test_batch_is_labelled_when_the_purges_can_be_read_again(settings, send, eventually, monkeypatch):
    failed, requests = [], Purges.requests

    def fail_once(self, *seconds):
        if not failed:
            failed.append(None)
            raise RedisConnectionError
        return requests(self, *seconds)

    stop, counts = threading.Event(), [LabellingCounts()]
    teacher = Teacher(settings, settings.redis_url, Path(settings.target.source), (1,), stop, counts.append)
    monkeypatch.setattr(Purges, "requests", fail_once)
    for number in range(3):
        send(number)
    with background(teacher.run, stop.set):
        eventually(lambda: counts[-1] == LabellingCounts(read=3, refused=0, traces=3))
    assert failed


def test_exchange_on_which_the_target_fails_is_refused_alone(settings, send, redis_client, eventually, monkeypatch):
    traces_of = Labeller.traces

    def fails(self: Labeller, readings: Sequence[Reading], between: Callable[[], None]) -> list[Any]:
        if any(reading.exchange.request_id == "chatcmpl-1-0" for reading in readings):
            raise RecursionError("private text")
        return traces_of(self, readings, between)

    monkeypatch.setattr(Labeller, "traces", fails)
    for number in range(4):
        send(number)
    eventually(lambda: redis_client.xlen("osd:tapped:domain:general") == 4)
    stop, counts = threading.Event(), [LabellingCounts()]
    teacher = Teacher(settings, settings.redis_url, Path(settings.target.source), (1,), stop, counts.append)
    with background(teacher.run, stop.set):
        eventually(lambda: counts[-1] == LabellingCounts(read=4, refused=1, traces=3))
    assert {trace.request_id for trace in traces(redis_client)} == {f"chatcmpl-{number}-0" for number in (0, 2, 3)}
    ((_, kept),) = redis_client.xrange("osd:tapped:refused")
    assert kept[b"reason"] == b"RecursionError"


@pytest.fixture
def assemble(settings, ends) -> Callable[[Sequence[tuple[str, str]]], None]:
    """Function that writes traces as the assembler of a vLLM does, for the request ids and domains that it receives."""
    writer = TraceWriter(settings.redis_url, settings.capture)
    ends.callback(writer.close)

    def assemble(requests: Sequence[tuple[str, str]]) -> None:
        target, registry = Path(settings.target.source), Registry(settings.registry_dir)
        taps = from_config(registry.load("general", 1).config, target).needs.taps
        label = identify(settings.target.source, target).label
        model = SlotModel(load_model(target, "float32", "cpu"), slots=1, context=200, scratch=1, taps=taps, label=label)
        labeller = Labeller(model, settings.capture, 1)
        for number, (request_id, domain) in enumerate(requests):
            text = list(f"{number % 3} and again {number % 3} and again ".encode())
            (trace,) = labeller.traces([Reading(make_exchange(request_id=request_id), text, text * 2)])
            tokens = trace.completion_ids.numpy()
            verdict = np.tile([ACCEPTED, REJECTED], len(tokens))[: len(tokens)]
            drafts = with_drafts(trace, np.where(verdict == ACCEPTED, tokens, 0).astype(np.int32), verdict)
            drafted_by = {"drafter_domain": "general", "drafter_version": 1}
            writer.offer(msgspec.structs.replace(drafts, domain=domain, created=time.time(), **drafted_by))

    return assemble


def test_drafter_learns_from_traces_of_vllm_without_a_teacher(settings, assemble, redis_client, eventually):
    with Learning(settings, capture=True) as learning:
        assert learning.teacher is None
        assemble([(f"chatcmpl-{number}", "sql" if number % 2 else "general") for number in range(40)])
        with Pointer(learning.redis_url, settings.registry_dir) as pointer:
            eventually(lambda: learning.check() or pointer.get("general").stable > 1)
        page = learning.dashboard.removesuffix("/dashboard")
        wanted = 'osd_traced_requests_total{domain="sql",version="1"} 20.0'
        eventually(lambda: wanted in httpx2.get(f"{page}/metrics").text)
        rows = {row["domain"]: row for row in httpx2.get(f"{page}/dashboard/data").json()["traced"]}
    assert set(rows) == {"general", "sql"}, "a vLLM has one drafter for all domains"
    (first, second), accepted = rows["sql"]["tested"], rows["sql"]["accepted"]
    assert accepted == [first, 0]
    assert 0 <= first - second <= 20, "each draft has one accepted and one rejected token, unless the answer ended"
    gate = Registry(settings.registry_dir).load("general", 2).manifest["gate"]
    assert gate["acceptance"] > gate["baseline_acceptance"]
    assert not redis_client.exists("osd:tapped:domain:general"), "no exchanges are read"


@pytest.mark.parametrize(("changed", "message"), [
    ({"drafter": {"kind": "medusa"}}, "^drafter.kind medusa does not learn from traces of vLLM"),
    ({"trainer": {"samples": "student"}}, "^trainer.samples must be teacher: vLLM's traces have no distributions"),
    (
        {"drafter": {"kind": "eagle"}, "growth": {"kind": "acceptance_head"}},
        "acceptance head, and vLLM drafts chains without one$",
    ),
    ({"trainer": {"extra_domains": "sql"}}, "^trainer.extra_domains: "),
    ({"capture": {"enabled": False}}, "capture.enabled must allow it$"),
])  # fmt: skip
def test_settings_that_traces_of_vllm_cannot_satisfy_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        check_learning(Settings(**changed), capture=True)


def test_traces_of_vllm_have_the_verdicts_of_rejected_positions():
    check_learning(Settings(trainer={"positions": "rejected"}), capture=True)


@pytest.mark.parametrize(("changed", "named"), [
    ({"trainer": {"enabled": False}}, "trainer.enabled"),
    ({"drafter": {"kind": "none"}}, "drafter.kind"),
    ({"trainer": {"positions": "rejected"}}, "trainer.positions"),
    ({"trainer": {"samples": "student"}}, "trainer.samples"),
    ({"trainer": {"workers": 2}}, "trainer.workers"),
    ({"trainer": {"processes": 2}}, "trainer.processes"),
    ({"trainer": {"extra_domains": "sql"}}, "trainer.extra_domains"),
])  # fmt: skip
def test_unsuitable_settings_of_learning_are_refused(changed, named):
    with pytest.raises(ConfigError, match=named):
        check_learning(Settings(**changed))


def test_home_in_use_is_refused(settings):
    with lock(settings.home_dir), pytest.raises(StartError, match="already runs"):
        Learning(settings).start()
