"""Several trainers that divide domains by a plan in a real Redis server."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis

from osd.config import Settings
from osd.registry import replica_loads
from osd.registry.pointer_file import FencedError
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from osd.registry.trainers import EXPIRY_MS, DomainPlan, TrainerReport, Trainers
from osd.registry.training import FundReport, Training, TrainingReports
from tests.clocks import Clock
from tests.reports import let_time_pass
from trainer.membership import Membership, Share, share_of

GATHERED, SETTLED = 6, 12
"""Seconds until starting trainers have divided the domains, and until a late trainer has its share."""
BUSY, IDLE = ReplicaLoad(16, 3, 1, 90.0), ReplicaLoad(0, 0, 1, 0.0)
DOMAINS = ("general", *(f"domain-{n}" for n in range(7)))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    trainer: Any = {"processes": 2, "extra_domains": DOMAINS[1:]}
    return Settings(home=tmp_path, trainer=trainer)


class Member:
    """Trainer that takes its planned domains as soon as no other member holds them."""

    def __init__(self, share: Membership, members: list[Member]) -> None:
        self.share, self.held, self.members = share, set[str](), members
        members.append(self)

    def look(self) -> set[str]:
        wanted = set(self.share.domains(self.held))
        taken = {domain for member in self.members if member is not self for domain in member.held}
        self.held = wanted - taken
        return wanted


class Team:
    """Trainers that follow one plan, with a fake clock as the time of Redis."""

    def __init__(self, settings: Settings, url: str, client: redis.Redis, ends: ExitStack) -> None:
        self.clock, self.members = Clock(), list[Member]()
        self._settings, self._url, self._client, self._ends = settings, url, client, ends

    def join(self, count: int = 1, machine: str | None = None) -> list[Member]:
        """Start trainers without a look at the plan."""
        shares = [Membership(self._settings, self._url, DOMAINS, machine, self.clock) for _ in range(count)]
        return [Member(self._ends.enter_context(closing(share)), self.members) for share in shares]

    def settled(self, count: int = 2) -> list[Member]:
        """Start trainers and let them divide the domains."""
        members = self.join(count)
        self.follow(GATHERED)
        return members

    def follow(self, seconds: float) -> None:
        """Let all trainers look once a second."""
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            for member in self.members:
                member.look()

    def silence(self, member: Member) -> None:
        """Stop a trainer without a goodbye and let its report expire."""
        self.members.remove(member)
        let_time_pass(self._client, "osd:trainers", member.share.name, EXPIRY_MS + 1)

    def divided(self) -> list[int]:
        """Return the number of domains of each trainer; check that each domain is held exactly once."""
        assert sorted(domain for member in self.members for domain in member.held) == sorted(DOMAINS)
        return sorted(len(member.held) for member in self.members)

    def held(self) -> list[set[str]]:
        return [set(member.held) for member in self.members]


@pytest.fixture
def team(
    settings: Settings, redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, ends: ExitStack
) -> Team:
    team, state = Team(settings, redis_url, redis_client, ends), Trainers.state
    monkeypatch.setattr(Trainers, "state", lambda trainers: state(trainers)._replace(time=team.clock()))
    return team


def test_trainers_that_start_together_divide_the_domains(team: Team):
    team.settled()
    assert team.divided() == [4, 4]
    before = team.held()
    team.follow(100)
    assert team.held() == before


def test_first_trainer_waits_before_it_takes_a_domain(team: Team):
    (first,) = team.join()
    team.follow(2)
    assert not first.held
    team.join()
    team.follow(GATHERED)
    assert team.divided() == [4, 4]


def test_domains_of_a_silent_trainer_move_and_come_back(team: Team):
    first, second = team.settled()
    kept = set(first.held)
    team.silence(second)
    team.follow(1)
    assert team.divided() == [8]
    assert kept <= first.held
    team.join()
    team.follow(SETTLED)
    assert team.divided() == [4, 4]


def test_trainer_that_leaves_is_replaced_at_the_next_look(team: Team):
    first, second = team.settled()
    team.members.remove(second)
    second.share.close()
    assert first.look() == set(DOMAINS)


def test_domains_leave_a_busy_machine_at_most_once_a_minute(team: Team, redis_url: str, monkeypatch):
    monkeypatch.setattr(replica_loads, "EXPIRY_MS", 60_000)
    (first,), (second,) = team.join(), team.join(machine="elsewhere")
    team.follow(GATHERED)
    before = set(second.held)
    with ReplicaLoads(redis_url) as loads, ReplicaLoads(redis_url, "elsewhere") as elsewhere:
        loads.report("a", BUSY)
        team.follow(20)
        assert team.divided() == [0, 8]
        assert second.held >= before
        elsewhere.report("a", BUSY)
        loads.report("a", IDLE)
        team.follow(45)
        assert not first.held
        team.follow(30)
        assert not second.held


def test_two_most_valuable_domains_go_to_different_trainers(team: Team, redis_url: str):
    with TrainingReports(redis_url) as reports:
        for domain in DOMAINS:
            worth = 100.0 if domain in DOMAINS[:2] else 1.0
            reports.set(domain, Training(account=FundReport(worth=worth)))
        members = team.settled()
    assert [len(member.held & set(DOMAINS[:2])) for member in members] == [1, 1]


def test_trainers_keep_their_domains_after_a_flush_of_redis(team: Team, redis_client: redis.Redis):
    team.settled()
    before = team.held()
    redis_client.flushall()
    team.follow(GATHERED)
    assert team.held() == before


def test_trainers_keep_their_domains_while_redis_is_down(team: Team, redis_server):
    first, second = team.settled()
    assert first.share.has_other_trainer(sorted(second.held)[0])
    before = set(first.held)
    redis_server.close()
    assert set(first.share.domains(first.held)) == before
    assert first.share.has_other_trainer(sorted(second.held)[0]) is None


def test_silent_trainer_holds_no_domain(team: Team):
    first, second = team.settled()
    theirs = sorted(second.held)[0]
    assert first.share.has_other_trainer(theirs) is True
    assert first.share.has_other_trainer(sorted(first.held)[0]) is False
    team.silence(second)
    first.look()
    assert first.share.has_other_trainer(theirs) is False


def test_only_one_of_two_plan_changes_succeeds(redis_url):
    with Trainers(redis_url) as first, Trainers(redis_url) as second:
        first.report("a", TrainerReport(("general",), 0.5))
        seen_by_first, seen_by_second = first.state(), second.state()
        assert seen_by_first.reports == {"a": TrainerReport(("general",), 0.5)}
        assert first.replace(seen_by_first, DomainPlan({"general": "a"}, 1.0))
        assert not second.replace(seen_by_second, DomainPlan({"general": "b"}, 1.0))
        assert second.state().plan == DomainPlan({"general": "a"}, 1.0)


def test_single_trainer_holds_all_domains_without_redis(settings):
    single = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"processes": 1})})
    share = share_of(single, "redis://127.0.0.1:1")
    assert type(share) is Share
    assert share.domains(()) == DOMAINS
    assert share.has_other_trainer("general") is None
    with pytest.raises(FencedError):
        share.handle_loss(FencedError("another trainer has taken over general"))
