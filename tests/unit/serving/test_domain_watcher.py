"""The drafters of other domains: which of them a replica has, and when."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisGone

from osd import drafting
from osd.config import Settings
from osd.drafting.base import DrafterError
from osd.registry.versions import Registry
from serving.replica import rollout_follower
from serving.replica.domain_watcher import DomainWatcher
from serving.replica.rollout_follower import Versions
from tests.unit.serving.rollouts import OneDrafter, ScriptedEvents, at
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
    """Drafters of domains that take every version but those of ``misfits``; drops the first idle one."""

    domain = "general"

    def __init__(self, misfits=()):
        self.misfits, self.asked, self.pool = misfits, set(), self
        self.domains = {"general": ScriptedDrafters(1)}

    def drafters(self, domain):
        return Handle(self, domain)

    def open(self, domain, number, weights, drafter):
        if domain in self.misfits:
            raise DrafterError("a shape is wrong")
        self.domains[domain] = ScriptedDrafters(number)

    def drop_idle(self):
        idle = next((domain for domain, line in self.domains.items() if domain != "general" and line.idle), None)
        self.domains.pop(idle, None)
        return idle

    def sweep(self):
        pass

    def drop(self, domain):
        del self.domains[domain]

    def others(self):
        return {domain: line.drafter_version for domain, line in self.domains.items() if domain != "general"}

    def wanted(self):
        asked, self.asked = self.asked, set()
        return asked


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
    def make(most=4, misfits=(), pointer=None):
        engine, events = ScriptedEngine(misfits), ScriptedEvents()
        settings = Settings(engine={"domains": most})
        return DomainWatcher(Versions(settings, registry, pointer, events, OneDrafter()), engine), engine, events

    return make


def versions(engine):
    return {domain: line.drafter_version for domain, line in engine.domains.items()}


def test_a_domain_gets_drafters_when_its_pointer_appears_and_is_followed_from_then_on(make):
    watcher, engine, events = make()
    watcher.look({"general": at(2)})
    assert versions(engine) == {"general": 1}, "the own domain is followed by another"
    watcher.look({"general": at(2), "code": at(1)})
    assert versions(engine) == {"general": 1, "code": 1}
    watcher.look({"code": at(2, canary=1)})
    assert versions(engine) == {"general": 1, "code": 2}
    assert engine.domains["code"].canary_version == 1
    watcher.look({"code": at(2)})
    assert engine.domains["code"].canary_version is None
    assert (events.events, events.domains) == ([("swapped", 2)], ["code"])


def test_a_line_that_begins_during_a_trial_has_the_canary_too(make):
    watcher, engine, _ = make()
    watcher.look({"code": at(1, canary=2)})
    assert (engine.domains["code"].drafter_version, engine.domains["code"].canary_version) == (1, 2)


def test_there_are_never_more_lines_than_allowed_and_what_is_asked_for_goes_first(make):
    watcher, engine, _ = make(most=2)
    pointers = {"code": at(1), "poems": at(1), "sql": at(1)}
    engine.asked = {"poems", "no such domain"}
    watcher.look(pointers)
    assert list(engine.domains) == ["general", "poems"]
    watcher.look(pointers)
    assert list(engine.domains) == ["general", "poems"], "nobody asked for the others"
    engine.asked = {"sql"}
    engine.domains["poems"].idle = False
    watcher.look(pointers)
    assert list(engine.domains) == ["general", "poems"], "a request uses it"
    engine.domains["poems"].idle = True
    watcher.look(pointers)
    assert list(engine.domains) == ["general", "sql"], "the wish was kept"
    engine.asked = {"poems"}
    watcher.look(pointers)
    assert list(engine.domains) == ["general", "poems"], "what gave way can come back"


def test_a_line_ends_with_its_pointer_unless_redis_has_lost_them_all(make):
    watcher, engine, _ = make()
    watcher.look({"general": at(1), "code": at(1), "sql": at(1)})
    watcher.look({})
    assert list(engine.domains) == ["general", "code", "sql"]
    watcher.look({"general": at(1), "sql": at(1)})
    assert list(engine.domains) == ["general", "sql"]
    watcher.look({"general": at(1), "code": at(2), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1, "code": 2}


def test_with_room_for_one_there_is_only_the_own_domain(make):
    watcher, engine, _ = make(most=1)
    engine.asked = {"code"}
    watcher.look({"code": at(1)})
    assert list(engine.domains) == ["general"]


@pytest.mark.parametrize(("misfits", "number"), [((), 99), (("code",), 1)], ids=["missing", "misfit"])
def test_a_domain_whose_version_cannot_be_used_has_no_line_until_its_pointer_moves(make, misfits, number):
    watcher, engine, events = make(misfits=misfits)
    for _ in range(3):
        watcher.look({"code": at(number), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1}
    assert (events.events, events.domains) == ([("rejected", number)], ["code"])
    assert watcher.rejected == 1
    engine.misfits = ()
    watcher.look({"code": at(1, changed=2.0), "sql": at(1)})
    assert versions(engine) == {"general": 1, "sql": 1, "code": 1}


def test_the_thread_outlives_a_redis_that_goes_and_ends_when_closed(make, monkeypatch):
    monkeypatch.setattr("serving.replica.domain_watcher.POLL_SECONDS", 0.01)
    answers = iter([RedisGone(), {"code": at(1)}])
    done = threading.Event()

    class Pointer:
        def news(self):
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


def test_a_domain_whose_version_cannot_be_read_now_is_opened_later(make, registry, monkeypatch):
    monkeypatch.setattr(rollout_follower, "_FIRST_PAUSE", 0.02)
    watcher, engine, events = make()
    load, failures = registry.load, iter([True, True])

    def flaky(domain, number):
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        return load(domain, number)

    monkeypatch.setattr(registry, "load", flaky)
    wait_until(lambda: watcher.look({"general": at(1), "code": at(2)}) or "code" in engine.domains, every=0.001)
    assert engine.domains["code"].drafter_version == 2
    assert watcher.rejected == 0
    assert events.events == []
