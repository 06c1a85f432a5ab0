"""Trainer for the drafters of several domains, with a real Redis."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.learning.online import Learner
from osd.registry.lease import Lease
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import FencedError, PointerFiles
from osd.registry.replica_loads import DomainWork, ReplicaLoad, ReplicaLoads
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry
from tests.integration.loop import settings_of
from tests.pointers import put
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy, make_trace
from tests.waiting import background, wait_until
from trainer import domain_workers
from trainer.domain_workers import DomainWorkers
from trainer.executor import TargetContext
from trainer.intake import Intake

Start = Callable[..., DomainWorkers]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path, extra_domains="code")


@pytest.fixture
def pointer(redis_url: str, settings: Settings) -> Iterator[Pointer]:
    with Pointer(redis_url, settings.registry_dir) as pointer:
        yield pointer


@pytest.fixture
def send(redis_url: str, settings: Settings) -> Iterator[Callable[..., None]]:
    """Function that writes ``count`` traces of a domain."""
    with contextlib.closing(TraceWriter(redis_url, settings.capture.model_copy(update={"max_queue": 2000}))) as writer:

        def write(domain: str, count: int, first: int = 0) -> None:
            for n in range(first, first + count):
                assert writer.offer(make_trace(f"{domain}-{n}", completion=30, seed=n, domain=domain))

        yield write


def context() -> TargetContext:
    return TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())


def publish(settings: Settings, pointer: Pointer, *domains: str) -> None:
    """Publish a first version with equal weights in each domain, and point to it."""
    torch.manual_seed(0)
    registry, drafter = Registry(settings.registry_dir), Toy()
    for domain in domains:
        number = registry.publish(domain, drafter.weights(), drafter.config(), {})
        put(pointer, domain, Rollout(number, None, 0.0, time.time()))


@pytest.fixture
def start(redis_url: str, settings: Settings, pointer: Pointer, send, monkeypatch, ends) -> Start:
    """Function that starts training, with a number of records for each domain."""
    monkeypatch.setattr(domain_workers, "_LOOK_SECONDS", 0.1)
    publish(settings, pointer, "general", "code")

    def begin(price_idle: float = 0.0, paused: bool = False, **records: int) -> DomainWorkers:
        trainer = settings.trainer.model_copy(update={"price_idle": price_idle})
        workers = DomainWorkers(settings.model_copy(update={"trainer": trainer}), redis_url, context())
        for domain, count in records.items():
            send(domain, count)
        if paused:
            assert workers.pause()
        ends.enter_context(background(workers.run, workers.stop))
        return workers

    return begin


def test_each_domain_learns_from_its_own_traffic(start: Start, settings: Settings, pointer: Pointer, eventually):
    workers = start(general=40, code=50)
    eventually(lambda: workers.status()["published"] and workers.status()["extra_domains"]["code"]["published"])
    general, code = workers.status(), workers.status()["extra_domains"]["code"]
    assert (general["records"], code["records"]) == (40, 50)
    for domain in ("general", "code"):
        rollout = pointer.get(domain)
        assert rollout is not None
        assert rollout.stable >= 2
        gate = Registry(settings.registry_dir).load(domain, rollout.stable).manifest["gate"]
        assert gate["acceptance"] > gate["baseline_acceptance"]


def test_domain_without_traffic_does_not_delay_others(start: Start, eventually) -> None:
    workers = start(code=40)
    eventually(lambda: workers.status()["extra_domains"]["code"]["steps"] > 10)
    assert workers.status()["steps"] == 0
    assert workers.pause()
    steps = workers.status()["extra_domains"]["code"]["steps"]
    assert workers.pause()  # its loops have run once more
    assert workers.status()["extra_domains"]["code"]["steps"] == steps
    workers.resume()
    eventually(lambda: workers.status()["extra_domains"]["code"]["steps"] > steps)


def test_trainer_paused_before_its_start_waits_for_resume(start: Start, eventually) -> None:
    workers = start(paused=True, code=40)
    eventually(lambda: workers.status()["extra_domains"]["code"]["state"] == "paused")
    assert workers.status()["extra_domains"]["code"]["steps"] == 0
    workers.resume()
    eventually(lambda: workers.status()["extra_domains"]["code"]["steps"] > 10)


def test_domain_with_an_empty_fund_gets_no_slice(start: Start, redis_url: str, eventually, monkeypatch) -> None:
    """Replicas report work for one domain only, and training has a price without requests too."""
    gather, waited = Intake.gather, []

    def record(intake: Intake, learner: Learner, seconds: float, sleep: Callable[[float], object]) -> None:
        waited.append((learner.counters.records > 0, seconds))
        gather(intake, learner, seconds, sleep)

    monkeypatch.setattr(Intake, "gather", record)
    with ReplicaLoads(redis_url) as loads:
        work = {"general": DomainWork(1.0), "code": DomainWork(1.0)}
        loads.report("r1", ReplicaLoad(0, 0, 1, 0.0), work)
        workers = start(price_idle=1e6, general=40, code=40)
        eventually(lambda: "the fund of training" in workers.status()["detail"])
        eventually(lambda: "the fund of training" in workers.status()["extra_domains"]["code"]["detail"])
        eventually(lambda: waited[-1] == (True, 3.0))
        assert (False, 1.0) in waited, "first records are expected each second"
        loads.report("r1", ReplicaLoad(0, 0, 1, 0.0), {**work, "code": DomainWork(1e12)})
        eventually(lambda: trains_alone(workers, lambda status: status["extra_domains"]["code"], lambda status: status))


def trains_alone(workers: DomainWorkers, active: Callable[[Any], Any], idle: Callable[[Any], Any]) -> bool:
    """Return whether the domain ``active`` does 20 steps while the domain ``idle`` does none."""
    before = workers.status()
    wait_until(lambda: active(workers.status())["steps"] >= active(before)["steps"] + 20)
    return idle(workers.status())["steps"] == idle(before)["steps"]


def test_error_in_one_domain_ends_all_and_is_raised(redis_url: str, settings: Settings, pointer: Pointer, start: Start):
    def broken(config: dict[str, Any]) -> Toy:
        raise MemoryError("no memory")

    workers = DomainWorkers(settings, redis_url, TargetContext(TARGET, VOCABULARY, HIDDEN, broken))
    with pytest.raises(MemoryError, match="no memory"):
        workers.run()


def test_remaining_trainer_continues_all_domains(
    redis_url: str, settings: Settings, pointer: Pointer, start: Start, send, eventually
) -> None:
    """Both trainers run in one process, because locks of leases belong to the file that opened them."""
    domains = [f"domain-{n}" for n in range(4)]
    publish(settings, pointer, *domains)
    trainer = {"processes": 2, "extra_domains": ("code", *domains), "replay_tokens": 6000, "replay_mb": 12}
    shared = settings.model_copy(update={"trainer": settings.trainer.model_copy(update=trainer)})
    for domain in shared.trained_domains:
        send(domain, 30)
    both = [DomainWorkers(shared, redis_url, context()) for _ in range(2)]
    with background(both[0].run, both[0].stop), TrainingReports(redis_url) as reports:

        def done(domain: str) -> int:
            return reports.get([domain]).get(domain, Training()).steps

        with background(both[1].run, both[1].stop):
            eventually(lambda: [len(workers.status()["domains"]) for workers in both] == [3, 3])
            first, second = (set(workers.status()["domains"]) for workers in both)
            assert first | second == set(shared.trained_domains)

            eventually(lambda: all(done(domain) > 20 for domain in domains))
            assert {both[0].status()["extra_domains"][domain]["detail"] for domain in second - {"general"}} == {
                "not assigned to this trainer"
            }
            eventually(lambda: rooms(both[0]) == {(2000, 4)})
        before = {domain: done(domain) for domain in second}
        for domain in second:
            send(domain, 10, 30)
        eventually(lambda: all(done(domain) > before[domain] for domain in second))
        assert both[0].status()["domains"] == sorted(shared.trained_domains)
        eventually(lambda: rooms(both[0]) == {(1000, 2)})
        assert {pointer.get(domain).fence for domain in second} == {2}  # type: ignore[union-attr]


def rooms(workers: DomainWorkers) -> set[tuple[int, int] | None]:
    """Return the replay limits of the domains of a trainer, in tokens and megabytes."""
    return {running.worker.intake.room for running in list(workers.running.values())}


class ScriptedShare:
    """Share of the domains that a test assigns to a trainer."""

    def __init__(self, *domains: str) -> None:
        self.assigned: tuple[str, ...] = domains
        self.running: list[str] = []
        self.errors: list[FencedError] = []

    def domains(self, held: Collection[str]) -> Collection[str]:
        self.running = sorted(held)
        return self.assigned

    def has_other_trainer(self, domain: str) -> None:
        return None

    def handle_loss(self, error: FencedError) -> None:
        self.errors.append(error)

    def close(self) -> None:
        self.running = []


@pytest.fixture
def scripted(redis_url: str, settings: Settings, start: Start, send) -> Iterator[tuple[DomainWorkers, ScriptedShare]]:
    """Running workers and their share of two domains with records."""
    share = ScriptedShare("general", "code")
    workers = DomainWorkers(settings, redis_url, context(), share)
    for domain in share.assigned:
        send(domain, 40)
    with background(workers.run, workers.stop):
        yield workers, share
    assert share.running == []


def test_domain_moves_away_and_returns_from_its_checkpoint(
    scripted: tuple[DomainWorkers, ScriptedShare], settings: Settings, eventually
) -> None:
    workers, share = scripted
    eventually(lambda: workers.status()["steps"] > 10)
    memory = weakref.ref(workers.running["general"].worker.intake.replay)
    steps = workers.status()["steps"]
    share.assigned = ("code",)
    eventually(lambda: workers.status()["domains"] == share.running == ["code"])
    assert workers.status()["steps"] == 0
    files = PointerFiles(settings.registry_dir)
    lease = Lease(files, "general")
    assert lease.take(Rollout(1, None, 0.0, 1.0)), "the lease is free"
    gc.collect()
    assert memory() is None
    lease.release()
    share.assigned = ("code", "general")
    eventually(lambda: workers.status()["steps"] >= steps)
    assert share.errors == []


def test_trainer_drops_a_domain_that_was_taken_over(
    scripted: tuple[DomainWorkers, ScriptedShare], settings: Settings, eventually
) -> None:
    workers, share = scripted
    eventually(lambda: share.running == ["code", "general"])
    files = PointerFiles(settings.registry_dir)
    files.update("general", lambda now: now and msgspec.structs.replace(now, fence=now.fence + 1))
    share.assigned = ("code",)
    eventually(lambda: share.errors)
    assert str(share.errors[0]).startswith("another trainer has taken over general: ")
    eventually(lambda: workers.status()["domains"] == ["code"])
    eventually(lambda: workers.status()["extra_domains"]["code"]["steps"] > 10)
