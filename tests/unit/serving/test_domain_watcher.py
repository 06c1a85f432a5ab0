"""Drafters of additional domains in a replica."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd import drafting
from osd.config import Settings
from osd.drafting.base import DrafterError
from osd.registry.versions import Registry
from serving.replica import rollout_follower
from serving.replica.domain_watcher import DomainWatcher
from serving.replica.rollout_follower import FollowerContext
from tests.unit.serving.rollouts import RecordingEvents, SingleDrafterCache, at
from tests.waiting import HANG_SECONDS, wait_until


class ScriptedDrafters:
    def __init__(self, version):
        self.drafter_version, self.canary_version, self.idle = version, None, True

    def stage(self, number, weights, drafter):
        self.drafter_version = number

    def swap_failure(self, number):
        return None

    def try_canary(self, rollout, weights, drafter=None):
        self.canary_version = rollout.canary

    def end_canary(self):
        self.canary_version = None


class ScriptedEngine:
    """Engine and pool whose domains accept every version except in ``misfits``; the first idle domain is dropped."""

    domain = "general"

    def __init__(self, misfits=()):
        self.misfits, self.requested, self.pool = misfits, set(), self
        self.domains = {"general": ScriptedDrafters(1)}

    def drafters(self, domain):
        return Handle(self, domain)

    def open(self, domain, number, weights, drafter):
        if domain in self.misfits:
            raise DrafterError("a shape is wrong")
        self.domains[domain] = ScriptedDrafters(number)

    def drop_idle(self):
        idle = next((name for name, drafters in self.domains.items() if name != "general" and drafters.idle), None)
        self.domains.pop(idle, None)
        return idle

    def sweep(self):
        pass

    def drop(self, domain):
        del self.domains[domain]

    def other_versions(self):
        return {name: version for name, version in versions(self).items() if name != "general"}

    def take_requested(self):
        requested, self.requested = self.requested, set()
        return requested


class Handle:
    def __init__(self, engine, domain):
        self.__dict__.update(_engine=engine, _domain=domain)

    def __getattr__(self, name):
        return getattr(self._engine.domains[self._domain], name)


@pytest.fixture(scope="module")
def registry(tiny_target, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings = Settings(home=home, drafter={"kind": "language_model"})
    first = drafting.initial(settings.drafter, tiny_target, home)
    registry = Registry(settings.registry_dir)
    for domain in ("general", "code", "sql", "poems"):
        for _ in range(2):
            registry.publish(domain, first.weights(), first.config(), {})
    return registry


@pytest.fixture
def make(registry):
    def make(limit=4, misfits=(), pointer=None):
        engine, events = ScriptedEngine(misfits), RecordingEvents()
        settings = Settings(engine={"domains": limit})
        context = FollowerContext(settings, registry, pointer, events, SingleDrafterCache())
        return DomainWatcher(context, engine), engine, events

    return make


def versions(engine):
    return {domain: drafters.drafter_version for domain, drafters in engine.domains.items()}


def test_domain_with_a_new_pointer_gets_drafters(make):
    watcher, engine, events = make()
    watcher.update({"general": at(2)})
    assert versions(engine) == {"general": 1}, "the default domain has its own watcher"
    watcher.update({"general": at(2), "code": at(1)})
    assert versions(engine) == {"general": 1, "code": 1}
    watcher.update({"code": at(2, canary=1)})
    assert versions(engine) == {"general": 1, "code": 2}
    assert engine.domains["code"].canary_version == 1
    watcher.update({"code": at(2)})
    assert engine.domains["code"].canary_version is None
    assert (events.events, events.domains) == ([("swapped", 2)], ["code"])


def test_new_domain_has_the_canary_of_its_rollout(make):
    watcher, engine, _ = make()
    watcher.update({"code": at(1, canary=2)})
    assert (engine.domains["code"].drafter_version, engine.domains["code"].canary_version) == (1, 2)


def test_requested_domain_replaces_an_idle_domain(make):
    watcher, engine, _ = make(limit=2)
    pointers = {"code": at(1), "poems": at(1), "sql": at(1)}
    engine.requested = {"poems", "no such domain"}
    watcher.update(pointers)
    assert list(engine.domains) == ["general", "poems"]
    watcher.update(pointers)
    assert list(engine.domains) == ["general", "poems"], "no request names another domain"
    engine.requested = {"sql"}
    engine.domains["poems"].idle = False
    watcher.update(pointers)
    assert list(engine.domains) == ["general", "poems"], "a request uses it"
    engine.domains["poems"].idle = True
    watcher.update(pointers)
    assert list(engine.domains) == ["general", "sql"], "the earlier request counts"
    engine.requested = {"poems"}
    watcher.update(pointers)
    assert list(engine.domains) == ["general", "poems"], "a dropped domain can return"


def test_domain_ends_with_its_pointer_unless_redis_lost_all(make):
    watcher, engine, _ = make()
    watcher.update({"general": at(1), "code": at(1), "sql": at(1)})
    watcher.update({})
    assert list(engine.domains) == ["general", "code", "sql"]
    watcher.update({"general": at(1), "sql": at(1)})
    assert list(engine.domains) == ["general", "sql"]
    watcher.update({"general": at(1), "code": at(2), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1, "code": 2}


def test_single_place_belongs_to_the_default_domain(make):
    watcher, engine, _ = make(limit=1)
    engine.requested = {"code"}
    watcher.update({"code": at(1)})
    assert list(engine.domains) == ["general"]


@pytest.mark.parametrize(("misfits", "number"), [((), 99), (("code",), 1)], ids=["missing", "misfit"])
def test_domain_with_a_bad_version_waits_for_its_pointer(make, misfits, number):
    watcher, engine, events = make(misfits=misfits)
    for _ in range(3):
        watcher.update({"code": at(number), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1}
    assert (events.events, events.domains) == ([("rejected", number)], ["code"])
    assert watcher.rejected == 1
    engine.misfits = ()
    watcher.update({"code": at(1, changed=2.0), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1, "code": 1}


def test_domain_watcher_survives_redis_and_ends_on_close(make, monkeypatch):
    monkeypatch.setattr("serving.replica.domain_watcher.POLL_SECONDS", 0.01)
    answers = iter([RedisConnectionError(), {"code": at(1)}])
    done = threading.Event()

    class Pointer:
        def subscribe(self):
            return nullcontext(SimpleNamespace(wait=lambda stop, interval: stop.wait(interval)))

        def all(self):
            answer = next(answers, None)
            if answer is None:
                done.set()
                return {}
            if isinstance(answer, Exception):
                raise answer
            return answer

    watcher, engine, _ = make(pointer=Pointer())
    before = threading.enumerate()
    watcher.start()
    assert done.wait(HANG_SECONDS)
    assert versions(engine) == {"general": 1, "code": 1}
    watcher.close()
    assert threading.enumerate() == before


def test_domain_with_an_unreadable_version_is_opened_later(make, registry, monkeypatch):
    monkeypatch.setattr(rollout_follower, "_FIRST_PAUSE", 0.02)
    watcher, engine, events = make()
    load, failures = registry.load, iter([True, True])

    def flaky(domain, number):
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        return load(domain, number)

    monkeypatch.setattr(registry, "load", flaky)
    wait_until(lambda: watcher.update({"general": at(1), "code": at(2)}) or "code" in engine.domains, every=0.001)
    assert engine.domains["code"].drafter_version == 2
    assert watcher.rejected == 0
    assert events.events == []
