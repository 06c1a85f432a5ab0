"""Trainer as a Ray actor, with a real Redis and a drafter for a small target."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import psutil
import pytest
import ray

from deploy.preparation import ensure_version
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.registry.events import Events
from osd.registry.versions import Registry
from osd.target.identity import identify
from tests.tiny import HIDDEN, VOCABULARY
from tests.unit.learning.toys import make_trace
from trainer import app


@pytest.fixture(scope="module")
def ray_cluster():
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        namespace="trainer-tests",
        logging_level="ERROR",
        # The same as in tests.priority, which the hook cannot import.
        runtime_env={"worker_process_setup_hook": lambda: setattr(os, "nice", lambda increment: 0)},
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()


@pytest.fixture
def settings(tiny_target, tmp_path, redis_url):
    settings = Settings(
        home=tmp_path,
        target={"source": str(tiny_target)},  # type: ignore[arg-type]
        drafter={"kind": "eagle", "vocabulary": VOCABULARY},  # type: ignore[arg-type]
        trainer={
            "min_records": 8, "held_out": 0.3, "micro_batch_tokens": 96, "update_tokens": 64, "steps_per_candidate": 40,
            "learning_rate": 0.01,
        },  # type: ignore[arg-type]
        capture={"max_queue": 1000, "max_records": 1000},  # type: ignore[arg-type]
    )  # fmt: skip
    ensure_version(settings, redis_url, tiny_target)
    return settings


@pytest.fixture
def send(settings, redis_url, next_token_logits, tiny_target, ends):
    writer = ends.enter_context(contextlib.closing(TraceWriter(redis_url, settings.capture)))

    def write(first, count):
        for n in range(first, first + count):
            trace = make_trace(
                f"request-{n}", prompt=6, completion=40, top_k=32, seed=n, logits=next_token_logits, width=3 * HIDDEN,
                target=identify(settings.target.source, tiny_target).label,
            )  # fmt: skip
            assert writer.offer(trace)

    return write


@pytest.fixture
def trainer(ray_cluster, settings, redis_url):
    (handle,) = app.start(settings, redis_url).actors
    yield handle
    ray.get(handle.stop.remote())
    ray.kill(handle)


def status(handle):
    return ray.get(handle.status.remote(), timeout=60)


def test_killed_trainer_continues_from_its_checkpoint(trainer, settings, redis_url, redis_client, send, eventually):
    send(0, 60)
    named = ray.get_actor("osd-trainer")
    eventually(lambda: status(named)["steps"] > 0)
    assert ray.get(named.pause.remote())
    steps = status(named)["steps"]
    assert ray.get(named.pause.remote())  # its loop has run once more
    assert status(named)["steps"] == steps
    assert status(named)["state"] == "paused"
    ray.get(named.resume.remote())
    checkpoint = settings.home_dir / "trainer" / "general.safetensors"
    eventually(lambda: status(trainer)["published"] >= 1 and checkpoint.exists())
    before = status(trainer)
    pid = ray.get(trainer.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    send(60, 10)
    eventually(lambda: status(trainer)["steps"] > 0)
    after = status(trainer)
    assert ray.get(trainer.__ray_call__.remote(lambda _: os.getpid())) != pid
    # It continues from the checkpoint of the last candidate, after 40 steps or more.
    assert after["steps"] >= 40
    assert after["published"] >= 1
    assert after["version"] >= 2
    eventually(lambda: "often enough" in status(trainer)["detail"])
    assert ray.get(trainer.stop.remote())
    # All records that were delivered before the kill are trained on or kept, and acknowledged.
    assert redis_client.xinfo_groups("osd:traces:domain:general")[0]["pending"] == 0
    manifest = Registry(settings.registry_dir).load("general", before["version"]).manifest
    assert manifest["gate"]["acceptance"] > manifest["gate"]["baseline_acceptance"]
    events = Events(redis_url)
    assert next(event["version"] for event in events.recent() if event["kind"] == "published") == 2
    events.close()


@pytest.mark.soak
def test_restarted_trainer_takes_domains_again(ray_cluster, settings, redis_url, tiny_target, send, eventually):
    def pids():
        return [ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60) for actor in trainers.actors]

    def domains():
        return [status(actor).get("domains", []) for actor in trainers.actors]

    update = {"processes": 2, "extra_domains": ("code", "sql", "math"), "tracking": "none"}
    several = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=update)})
    ensure_version(several, redis_url, tiny_target)
    trainers = app.start(several, redis_url)
    try:
        assert app.running_trainers("trainer-tests") == ["osd-trainer", "osd-trainer-2"]
        send(0, 60)
        eventually(lambda: list(map(len, domains())) == [2, 2])
        eventually(lambda: trainers.status()["published"] >= 1)
        first = 0 if "general" in domains()[0] else 1
        killed = pids()[first]
        os.kill(killed, signal.SIGKILL)
        at = time.monotonic()
        eventually(lambda: "general" in status(trainers.actors[1 - first])["domains"])
        print(f"the other trainer has its domains after {time.monotonic() - at:.1f} s")
        eventually(lambda: trainers.status()["steps"] >= 40)  # from the checkpoint
        eventually(lambda: list(map(len, domains())) == [2, 2])
        assert killed not in pids()
        assert trainers.pause()
        now = trainers.status()
        states = [now["state"], *(now["extra_domains"][name]["state"] for name in ("code", "sql", "math"))]
        assert states == 4 * ["paused"]
        trainers.resume()
        assert trainers.stop(20.0)
    finally:
        trainers.kill()


@pytest.mark.soak
@pytest.mark.fault(
    "one of several training workers is killed",
    "training continues from the checkpoint, and unacknowledged records are read again",
    process="training worker: SIGKILL",
)
def test_workers_continue_after_one_is_killed(ray_cluster, settings, redis_url, redis_client, send, eventually):
    def ranks():
        """Return the processes of the training workers."""
        pids = set()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
                if "RayTrainWorker" in "".join(child.cmdline()):
                    pids.add(child.pid)
        return pids

    def rank_zero():
        """Return the process that reads the stream."""
        port = redis_client.connection_pool.connection_kwargs["port"]
        for pid in ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections()
                if any(connection.raddr and connection.raddr.port == port for connection in connections):
                    return pid
        return None

    update = {"workers": 2, "steps_per_candidate": 15, "tracking": "none"}
    together = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=update)})
    (handle,) = app.start(together, redis_url).actors
    try:
        send(0, 60)
        eventually(lambda: status(handle)["published"] >= 1)
        assert ray.get(handle.pause.remote())
        before = status(handle)
        assert before["state"] == "paused"
        first, workers = rank_zero(), ranks()
        assert len(workers) == 2
        assert first in workers
        os.kill((workers - {first}).pop(), signal.SIGKILL)
        send(60, 20)
        ray.get(handle.resume.remote())
        # Training continues from the checkpoint.
        eventually(lambda: status(handle)["steps"] > before["steps"])
        assert rank_zero() not in (first, None)
        # The other rank may see a lost connection before Ray Train ends it.
        assert re.search("Connection|died", status(handle)["failure"])
        assert status(handle)["version"] >= before["version"] > 1
        eventually(lambda: "often enough" in status(handle)["detail"])
        assert status(handle)["records"] >= 80  # records that were not acknowledged are delivered again
        assert ray.get(handle.stop.remote(20.0))
    finally:
        ray.kill(handle)
    assert redis_client.xinfo_groups("osd:traces:domain:general")[0]["pending"] == 0
    manifest = Registry(settings.registry_dir).load("general", before["version"]).manifest
    assert manifest["gate"]["acceptance"] > manifest["gate"]["baseline_acceptance"]
    assert not ranks()
