"""What servers behind taps count decides on canaries."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.registry.lease import Lease
from osd.registry.pointer import Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.replica_loads import UpstreamReport
from osd.registry.versions import Registry
from tests.unit.learning.toys import Toy
from tests.unit.trainer.clocks import FakeTime
from tests.unit.trainer.test_rollout import Redis
from trainer import canary
from trainer.canary import Evidence, Upstreams
from trainer.rollout import CanaryWatch, Service


class Loads:
    """What taps tell, one answer after the other."""

    def __init__(self, *answers) -> None:
        self.answers: Iterator = iter(answers)

    def upstreams(self):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def told(version: int, rounds: int, accepted: tuple[int, ...], domain: str = "general") -> UpstreamReport:
    total = sum(accepted)
    return UpstreamReport(
        0.0, domain, version, rounds=rounds, drafted=3 * rounds, accepted=total, accepted_per_position=accepted
    )


@pytest.fixture
def evidence(monkeypatch):
    """What is shown by answers that come a second apart; a second look within the second asks for none."""
    clock = FakeTime()
    monkeypatch.setattr(canary, "time", clock)

    def read(*answers) -> list[Evidence]:
        watch, shown = Upstreams(Loads(*answers), "general"), []
        for _ in answers:
            shown += [*watch.new(), *watch.new()]
            clock.sleep(1.0)
        return shown

    return read


def test_what_was_counted_between_two_reports_is_of_the_version_that_drafted_at_both(evidence):
    reports = [told(1, 10, (5, 2, 1)), told(1, 30, (15, 7, 3)), told(2, 40, (20, 9, 4)), told(2, 50, (24, 10, 4))]
    first, second = evidence(*({"a": report} for report in reports))
    assert first == Evidence(1, 17, 20 + 10 + 5, 20 + 17), "tested are those behind none that was rejected"
    assert second == Evidence(2, 5, 10 + 4 + 1, 10 + 5)


def test_a_server_that_was_started_anew_another_domain_and_one_that_rests_show_nothing(evidence):
    assert evidence({"a": told(1, 30, (9, 3))}, {"a": told(1, 5, (2, 0))}) == []
    assert evidence({"a": told(1, 30, (9, 3), "x")}, {"a": told(1, 40, (12, 4), "x")}) == []
    assert evidence({"a": told(1, 30, (9, 3))}, {"a": told(1, 30, (9, 3))}) == []
    assert evidence({}, {"a": told(1, 30, (9, 3))}) == []


def test_a_redis_that_is_gone_for_a_while_loses_nothing(evidence):
    gone = RedisConnectionError("gone")
    (shown,) = evidence({"a": told(1, 10, (5, 2))}, gone, {"a": told(1, 30, (15, 6))})
    assert (shown.accepted, shown.version) == (14, 1)


def test_several_servers_are_told_apart(evidence):
    before = {"a": told(1, 10, (5, 2)), "b": told(2, 90, (50, 9))}
    after = {"a": told(1, 20, (9, 4)), "b": told(2, 95, (52, 9))}
    assert [(one.version, one.accepted) for one in evidence(before, after)] == [(1, 6), (2, 2)]


def seconds(version: int, chance: float, count: int) -> list[Evidence]:
    """What a server shows in so many seconds of 40 rounds, each with a draft of one token."""
    drawn = np.random.default_rng(version).binomial(40, chance, count).tolist()
    return [Evidence(version, accepted, 40, 40 + accepted) for accepted in drawn]


@pytest.mark.parametrize(
    ("chance", "action", "in_service"), [(0.35, "roll_back", 1), (0.55, "promote", 2), (0.1, "roll_back", 1)]
)
def test_a_server_with_one_drafter_decides_by_what_the_version_before_the_canary_did(
    tmp_path, chance, action, in_service
):
    registry = Registry(tmp_path)
    for _ in range(2):
        registry.publish("general", Toy().weights(), Toy().config(), {"gate": {"per_depth": [0.5]}})
    redis = Redis(Rollout(1, 2, 0.5, 0.0))
    watch = CanaryWatch(Service("general", registry, redis, redis, Lease(PointerFiles(tmp_path), "general")), 1e9)
    for shown in seconds(1, 0.5, 100):
        watch.count(shown)
    assert watch.decide(0.0) is None
    watch.follow(Rollout(1, 2, 0.5, 0.0))
    judgement = None
    for shown in seconds(2, chance, 100):
        watch.count(shown)
        judgement = watch.decide(0.0)
        if judgement is not None and judgement.action != "watch":
            break
    assert judgement is not None
    print(judgement)
    assert judgement.action == action
    assert (redis.moves[-1].stable, redis.moves[-1].canary) == (in_service, None)
    assert watch.canary is None
