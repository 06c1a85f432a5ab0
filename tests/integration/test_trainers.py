"""Several trainers that follow one plan in a real Redis: each by what it reads there alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from osd.config import Settings
from osd.registry import trainers as module
from osd.registry.pointer_file import FencedError
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.registry.trainers import Plan, TrainerReport, Trainers
from osd.registry.training import Expected, Training, TrainingReports
from trainer import membership
from trainer.membership import Alone, Membership, share_of

DOMAINS = ("general", *(f"domain-{n}" for n in range(7)))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    trainer: Any = {"processes": 2, "extra_domains": DOMAINS[1:]}
    return Settings(home=tmp_path, trainer=trainer)


class Member:
    """A trainer that has whatever it is to have, as soon as nobody else has it."""

    def __init__(self, share: Membership, everybody: list[Member]) -> None:
        self.share, self.held, self.everybody = share, set[str](), everybody
        everybody.append(self)

    def look(self) -> set[str]:
        wanted = set(self.share.domains(self.held))
        others = {domain for one in self.everybody if one is not self for domain in one.held}
        self.held = wanted - others
        return wanted

    def die(self) -> None:
        """Say nothing any more."""
        self.everybody.remove(self)


@pytest.fixture
def join(settings: Settings, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "EXPIRY_MS", 300)
    monkeypatch.setattr(membership, "_GATHER_SECONDS", 0.3)
    monkeypatch.setattr(membership, "_SETTLED_SECONDS", 0.2)
    made: list[Membership] = []
    everybody: list[Member] = []

    def begin(count: int = 1, seconds: float = 0.5) -> list[Member]:
        shares = [Membership(settings, redis_url, DOMAINS) for _ in range(count)]
        made.extend(shares)
        members = [Member(share, everybody) for share in shares]
        follow(everybody, seconds)
        return members

    yield begin
    for share in made:
        share.close()


def follow(members: list[Member], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for member in members:
            member.look()
        time.sleep(0.03)


def divided(members: list[Member]) -> list[int]:
    """How many domains each has; all together have each one once."""
    assert sorted(domain for member in members for domain in member.held) == sorted(DOMAINS)
    return sorted(len(member.held) for member in members)


def test_trainers_that_start_together_divide_the_domains_and_then_nothing_moves(join):
    members = join(2)
    assert divided(members) == [4, 4]
    before = [set(member.held) for member in members]
    follow(members, 0.5)
    assert [member.held for member in members] == before


def test_the_first_one_waits_a_moment_for_the_others_and_takes_nothing_that_is_to_be_theirs(join, monkeypatch):
    monkeypatch.setattr(membership, "_GATHER_SECONDS", 1.0)
    monkeypatch.setattr(membership, "_SETTLED_SECONDS", 60.0)
    (first,) = join(1, 0.2)
    assert not first.held
    (second,) = join(1, 1.2)
    assert divided([first, second]) == [4, 4]


def test_the_domains_of_one_that_is_silent_go_to_the_others_and_come_back_with_a_new_one(join):
    first, second = join(2)
    kept = set(first.held)
    second.die()
    follow([first], 0.6)
    assert divided([first]) == [8]
    assert kept <= first.held
    (third,) = join()
    follow([first, third], 0.4)
    assert divided([first, third]) == [4, 4]


def test_who_leaves_is_replaced_without_a_wait(join):
    first, second = join(2)
    second.die()
    second.share.close()
    assert first.look() == set(DOMAINS)


def test_domains_leave_a_machine_without_spare_time_but_not_more_than_once_a_minute(
    join, redis_url, monkeypatch, redis_client
):
    monkeypatch.setattr(membership, "_ROOM_SECONDS", 0.05)
    first, second = join(2)
    before = set(first.held)
    with ReplicaLoads(redis_url) as loads, ReplicaLoads(redis_url, "elsewhere") as elsewhere:
        second.share._capacity._loads = elsewhere
        for _ in range(6):
            loads.report("busy", ReplicaLoad(16, 3, 1, 90.0))
            follow([first, second], 0.1)
        assert divided([first, second]) == [0, 8]
        assert second.held >= before
        for _ in range(6):  # now it is the other way round
            elsewhere.report("busy", ReplicaLoad(16, 3, 1, 90.0))
            loads.report("busy", ReplicaLoad(0, 0, 1, 0.0))
            follow([first, second], 0.1)
        assert divided([first, second]) == [0, 8]
        monkeypatch.setattr(membership, "_BALANCE_SECONDS", 0.0)
        elsewhere.report("busy", ReplicaLoad(16, 3, 1, 90.0))
        follow([first, second], 0.3)
        assert not second.held


def test_the_two_that_are_worth_most_go_to_different_trainers(join, redis_url):
    with TrainingReports(redis_url) as reports:
        for domain in DOMAINS:
            earns = 100.0 if domain in DOMAINS[:2] else 1.0
            reports.set(domain, Training(expected=Expected(True, 0.1, 600.0, earns, 1.0)))
        members = join(2)
    assert [len(member.held & set(DOMAINS[:2])) for member in members] == [1, 1]


def test_a_redis_that_lost_everything_changes_nothing(join, redis_client: redis.Redis):
    members = join(2)
    before = [set(member.held) for member in members]
    redis_client.flushall()
    follow(members, 0.8)
    assert [member.held for member in members] == before


def test_while_redis_is_gone_everybody_keeps_what_he_has_and_nobody_is_taken_for_gone(join, redis_server):
    first, second = join(2)
    assert first.share.elsewhere(sorted(second.held)[0])
    before = set(first.held)
    redis_server.close()
    try:
        assert set(first.share.domains(first.held)) == before
        assert first.share.elsewhere(sorted(second.held)[0]) is None
    finally:
        redis_server.start()


def test_a_trainer_that_is_silent_has_no_domain_any_more(join):
    first, second = join(2)
    theirs = sorted(second.held)[0]
    assert first.share.elsewhere(theirs) is True
    assert first.share.elsewhere(sorted(first.held)[0]) is False
    second.die()
    time.sleep(0.4)
    first.look()
    assert first.share.elsewhere(theirs) is False


def test_of_two_that_change_the_same_plan_one_does(redis_url):
    with Trainers(redis_url) as one, Trainers(redis_url) as other:
        one.report("a", TrainerReport(("general",), 0.5))
        seen, seen_too = one.now(), other.now()
        assert seen.reports == {"a": TrainerReport(("general",), 0.5)}
        assert one.replace(seen, Plan({"general": "a"}, 1.0))
        assert not other.replace(seen_too, Plan({"general": "b"}, 1.0))
        assert other.now().plan == Plan({"general": "a"}, 1.0)


def test_one_trainer_has_every_domain_without_asking_and_ends_where_another_one_took_over(settings):
    single = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"processes": 1})})
    share = share_of(single, "redis://127.0.0.1:1")
    assert isinstance(share, Alone)
    assert share.domains(()) == DOMAINS
    assert share.elsewhere("general") is None
    with pytest.raises(FencedError):
        share.lost(FencedError("another trainer has taken over general"))
