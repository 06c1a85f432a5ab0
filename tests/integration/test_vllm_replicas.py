"""Replicas with vLLM as their engine in ``osd up``, with a stand-in for vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
import torch

from osd.drafting.eagle.drafter import Eagle
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from osd.target.model import load_model
from tests.clients import ClientThread
from tests.command import osd, wait_until_it_answers
from tests.redis_servers import free_port
from tests.standin import standin_python
from tests.tiny import make_tiny
from tests.up import Up
from tests.waiting import HANG_SECONDS, wait_until


class VllmUp(Up):
    """Running ``osd up`` with two replicas and three drafter versions."""

    home: Path

    def engines(self) -> list[psutil.Process]:
        """Return the processes of vLLM's engines."""
        return [engine for replica in self.workers("ServeReplica") for engine in replica.children()]

    def move(self, version: int, canary: int | None = None) -> None:
        """Bring a version into service, and another on trial."""
        PointerFiles(self.home / "registry").update("general", lambda _: Rollout(version, canary, 0.5, 1.0))


def publish(target: Path, home: Path) -> None:
    """Publish two drafter versions, the first of which is in service, and a third one of another shape."""
    model, registry = load_model(target, "float32", "cpu"), Registry(home / "registry")
    for vocabulary in (64, 64, 48):
        drafter = Eagle.from_target(model, vocabulary)
        with torch.no_grad():
            for weight in drafter.trained().values():
                weight.add_(0.01)
        registry.publish("general", drafter.weights(), drafter.config(), {})
    PointerFiles(registry.root).update("general", lambda _: Rollout(1, None, 0.0, 1.0))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def starting(folder: Path, **changed: object) -> Iterator[VllmUp]:
    """Start the service with other options, and wait for its replicas."""
    target, home, port = make_tiny(folder / "tiny", layers=6), folder / "home", free_port()
    publish(target, home)
    options = {
        "target.source": target,
        "target.dtype": "float32",
        "engine.kind": "vllm",
        "engine.vllm.python": standin_python(folder),
        "engine.vllm.args": "--max-model-len 128",
        "drafter.kind": "eagle",
        "drafter.vocabulary": 64,
        "trainer.enabled": "false",
        "trainer.canary_share": 0.5,
        "serving.port": port,
        "serving.replicas": 2,
        **changed,
    }
    arguments = [argument for key, value in options.items() for argument in ("--set", f"{key}={value}")]
    with osd(home, "up", *arguments) as process:
        wait_until_it_answers(process, port)
        service = VllmUp(port, process)
        service.home = home
        wait_until(lambda: len(service.versions()) == options["serving.replicas"], every=0.1)
        yield service


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmUp]:
    with starting(tmp_path_factory.mktemp("vllm")) as service:
        yield service


def test_metrics_are_summed_over_the_replicas(up):
    processes = {up.complete().json()["pid"] for _ in range(20)}
    assert len(processes) == 2
    wait_until(lambda: up.metric("vllm:request_success_total") == 20, 60)
    assert up.metric("vllm:generation_tokens_total") == 40
    assert up.metric("vllm:e2e_request_latency_seconds_count") == 20
    assert up.metric("vllm:spec_decode_num_draft_tokens_total") == 120
    assert up.metric("osd_drafter_version") == 2  # version 1 of each replica


def test_replicas_run_vllm_with_the_stable_export(up):
    answers = [up.complete().json() for _ in range(8)]
    assert {answer["drafter"] for answer in answers} == {str(up.home / "vllm" / "general" / "1")}
    assert {answer["pid"] for answer in answers} <= {replica.pid for replica in up.workers("ServeReplica")}
    assert httpx2.get(f"{up.url}/v1/models").json()["data"] == [{"id": "tiny"}]
    assert httpx2.get(f"{up.url}/dashboard/data").json()["model"]["context"] == 128


def test_paths_that_administer_vllm_do_not_exist(up):
    for path in ("/scale_elastic_ep", "/v1/load_lora_adapter", "/collective_rpc"):
        assert httpx2.post(f"{up.url}{path}", json={}).status_code == 404


def test_all_replicas_follow_the_pointer_without_a_restart(up):
    processes = {replica.pid for replica in up.workers("ServeReplica")}
    up.move(2)
    try:
        wait_until(lambda: [*up.versions().values()] == [2, 2], every=0.1)
    finally:
        up.move(1)
    wait_until(lambda: [*up.versions().values()] == [1, 1], every=0.1)
    assert {replica.pid for replica in up.workers("ServeReplica")} == processes


def test_canary_runs_in_one_of_two_replicas(up):
    up.move(1, canary=2)
    try:
        wait_until(lambda: sorted(up.versions().values()) == [1, 2], every=0.1)
        for _ in range(30):  # three times the period in which replicas follow
            assert 1 in up.versions().values()
            time.sleep(0.1)
    finally:
        up.move(1)
    wait_until(lambda: [*up.versions().values()] == [1, 1], every=0.1)


def test_killed_replica_breaks_its_requests_only_and_returns(up):
    victim = up.complete().json()["pid"]
    clients = up.in_flight(streams=6, answers=0)
    (engine,) = psutil.Process(victim).children()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: up.complete().status_code == 200)
    wait_until(lambda: len(up.workers("ServeReplica")) == 2 and len(up.versions()) >= 2, every=0.1)
    assert victim not in {replica.pid for replica in up.workers("ServeReplica")}
    assert 0 < sum(client.error() is not None for client in clients) < len(clients)
    wait_until(lambda: has_ended(engine), what="the end of the engine of a killed replica")


def test_replica_whose_engine_ended_is_replaced(up):
    first = up.complete(prompt="end the engine").json()["pid"]
    wait_until(lambda: first not in {replica.pid for replica in up.workers("ServeReplica")}, every=0.1)
    wait_until(lambda: len(up.engines()) == 2, every=0.1)


def test_version_of_another_shape_restarts_replicas_in_turn(up):
    before = {replica.pid for replica in up.workers("ServeReplica")}
    up.move(3)

    def has_moved() -> bool:
        assert up.complete().status_code == 200
        return [*up.versions().values()] == [3, 3]

    wait_until(has_moved, every=0.1)
    assert before.isdisjoint({replica.pid for replica in up.workers("ServeReplica")})
    assert up.complete().json()["drafter"] == str(up.home / "vllm" / "general" / "3")


def test_stop_lets_running_requests_finish(up):
    client = ClientThread(up.url, max_tokens=400, stream=True)
    client.started.wait(HANG_SECONDS)
    engines = up.engines()
    up.process.send_signal(signal.SIGINT)
    assert client.error() is None
    assert up.process.wait(HANG_SECONDS) == 130
    wait_until(lambda: all(map(has_ended, engines)), what="the end of all engines")


@pytest.mark.soak
def test_replicas_follow_the_load_and_one_tries_canaries(tmp_path):
    limits = {"engine.vllm.args": "--max-model-len 8192 --max-num-seqs 2"}
    with starting(tmp_path, **{"serving.replicas": 1, "serving.max_replicas": 2, **limits}) as up:
        clients = [ClientThread(up.url, max_tokens=6000, stream=True) for _ in range(4)]
        wait_until(lambda: len(up.versions()) == 2, every=0.1)
        up.move(1, canary=2)
        wait_until(lambda: sorted(up.versions().values()) == [1, 2], every=0.1)
        assert [client.error() for client in clients] == [None] * len(clients)
        wait_until(lambda: [*up.versions().values()] == [2], every=0.1, what="one replica, which tries the canary")
