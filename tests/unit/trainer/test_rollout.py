from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.drafting.recall.snapshot import Snapshots
from osd.learning.batch import collate
from osd.learning.gate import Gate
from osd.recall.reference import PlainBackend
from osd.registry.events import Events
from osd.registry.lease import Lease
from osd.registry.pointer import Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from osd.target.identity import Identity
from tests.unit.learning.toys import Toy, make_trace
from tests.unit.trainer.traffic import live
from trainer.rollout import Promotion, Service


class Redis(Events):
    """Pointer and events in memory; ``answers`` are given by ``get`` one after the other, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.moves = []
        self.events, self.recalled, self.costs = [], [], []

    def get(self, domain):
        if self.moves:
            return self.moves[-1]
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def replace(self, domain, before, rollout, fence):
        if self.get(domain) != before:
            return False
        self.moves.append(rollout)
        return True

    def add(self, kind, domain, version, **figures):
        self.events.append((kind, version))
        self.recalled.append(figures.get("recall"))
        self.costs.append(figures.get("core_seconds"))


def publisher_of(registry, redis, settings):
    lease = Lease(PointerFiles(registry.root), "general")
    return Promotion(Service("general", registry, redis, redis, lease), settings, lambda config: Toy(), 20)


STABLE = Rollout(1, None, 0.0, 1.0)


@pytest.fixture
def propose(tmp_path):
    def run(redis, share=0.0):
        torch.manual_seed(0)
        registry = Registry(tmp_path)
        if not registry.list("general"):
            registry.publish("general", Toy().weights(), Toy().config(), {})
        gate = Gate(depth=2, divergence="forward_kl", min_positions=10)
        settings = TrainerSettings(canary_share=share, canary_seconds=60)
        publisher = publisher_of(registry, redis, settings)
        candidate = Toy()
        candidate.load_weights(registry.load("general", 1).weights)
        batches = [collate([make_trace(completion=30)])]

        def judge(one, other):
            return gate.judge(one, other, lambda: batches)

        return (
            publisher.propose(
                candidate, judge, lambda decision: {"trained_on": {"steps": 1}, "cost": {"core_seconds": 9.0}}
            ),
            registry,
            publisher,
        )

    return run


def test_a_candidate_that_passes_is_published_and_put_in_service(propose):
    redis = Redis(STABLE)
    outcome, registry, _ = propose(redis)
    assert outcome.version == 2
    assert [move.stable for move in redis.moves] == [2]
    manifest = registry.load("general", 2).manifest
    assert (manifest["parent"], manifest["trained_on"]) == (1, {"steps": 1})
    assert redis.events == [("published", 2)]
    assert redis.costs == [9.0]


@pytest.mark.parametrize("looks", [2, 3])  # until the evaluation is over, and until the version is written
def test_a_pointer_that_somebody_moved_meanwhile_is_left_alone(propose, looks):
    redis = Redis(*[STABLE] * looks, Rollout(1, None, 0.0, 2.0))
    outcome, registry, publisher = propose(redis)
    assert (outcome.version, outcome.decision.waits, publisher.stable) == (None, True, 1)
    assert redis.moves == redis.events == []
    assert len(registry.list("general")) == looks - 1


def test_a_pinned_domain_is_not_moved(propose):
    redis = Redis(Rollout(1, None, 0.0, 1.0, pinned=True))
    outcome, registry, _ = propose(redis, share=0.2)
    assert outcome.decision.waits
    assert outcome.decision.reason == "version 1 is pinned"
    assert redis.moves == []
    assert len(registry.list("general")) == 1


@pytest.mark.parametrize("before", [0, 2])
def test_without_redis_nothing_is_published(propose, before):
    redis = Redis(*[STABLE] * before, RedisConnectionError("gone"))
    with pytest.raises(RedisConnectionError):
        propose(redis)
    assert redis.moves == []


def test_without_any_version_in_service_a_candidate_waits(propose):
    outcome, _, _ = propose(Redis(None))
    assert outcome.decision.waits
    assert "no drafter version of general to compare with" in outcome.decision.reason


@pytest.fixture
def canary(propose):
    """A publisher with version 2 on trial, its registry, and the pointer."""
    redis = Redis(STABLE)
    outcome, registry, publisher = propose(redis, share=0.2)
    assert outcome.version == 2
    return publisher, registry, redis


def show(publisher, version, rate, requests=200):
    rng = np.random.default_rng(version)
    for _ in range(requests):
        publisher.watch.observe(live(rng, version, rate))


def test_what_passes_the_gate_serves_a_share_of_requests_first(canary):
    publisher, _, redis = canary
    (move,) = redis.moves
    assert (move.stable, move.canary, move.share) == (1, 2, 0.2)
    assert redis.events == [("canary", 2)]
    assert publisher.stable == 1
    assert publisher.decide(time.monotonic()).action == "watch"
    assert len(redis.moves) == 1


@pytest.mark.parametrize(
    ("rate", "action", "event"), [(0.5, "promote", ("promoted", 2)), (0.1, "roll_back", ("rolled_back", 1))]
)
def test_a_canary_that_is_better_is_the_next_baseline_and_a_worse_one_is_rolled_back(canary, rate, action, event):
    publisher, registry, redis = canary
    show(publisher, 1, 0.3)
    show(publisher, 2, rate)
    assert publisher.decide(time.monotonic()).action == action
    assert (redis.moves[-1].stable, redis.moves[-1].canary, redis.moves[-1].share) == (event[1], None, 0.0)
    assert redis.events[-1] == event
    assert publisher.stable == event[1]
    assert publisher.decide(time.monotonic()) is None
    assert registry.numbers("general") == [1, 2]


@pytest.mark.parametrize(("rate", "kind"), [(0.5, "promoted"), (0.1, "rolled_back")])
def test_a_rollout_names_what_was_recalled_when_it_was_judged(propose, tmp_path, rate, kind):
    target, snapshots = Identity("target", "a", "b"), Snapshots(tmp_path)
    first = snapshots.write("general", PlainBackend().memory(8), target).sha256
    redis = Redis(STABLE)
    _, registry, publisher = propose(redis, share=0.2)
    assert registry.load("general", 2).manifest["recall"] == first
    then = snapshots.write("general", PlainBackend().memory(16), target).sha256
    show(publisher, 1, 0.3)
    show(publisher, 2, rate)
    publisher.decide(time.monotonic())
    assert [event for event, _ in redis.events] == ["canary", kind]
    assert redis.recalled == [first, then]
    assert first != then


def test_a_canary_without_requests_is_rolled_back_at_its_time_limit(canary):
    publisher, _, redis = canary
    began = time.monotonic()
    assert publisher.decide(began + 59).action == "watch"
    assert publisher.decide(began + 60).action == "roll_back"
    assert redis.moves[-1].stable == 1


def test_a_decision_of_somebody_else_is_left_alone(canary):
    publisher, _, redis = canary
    redis.moves.append(Rollout(2, None, 0.0, 5.0))
    show(publisher, 1, 0.6)
    show(publisher, 2, 0.2)
    assert publisher.decide(time.monotonic()).action == "watch"
    assert redis.moves[-1] == Rollout(2, None, 0.0, 5.0)
    assert publisher.watch.canary is None


def test_while_a_canary_is_on_trial_the_next_candidate_waits(canary):
    publisher, registry, _ = canary
    outcome = publisher.propose(Toy(), lambda: [], lambda decision: {})
    assert outcome.decision.waits
    assert outcome.decision.reason == "version 2 is still a canary"
    assert len(registry.list("general")) == 2


def test_a_successor_watches_the_canary_that_the_pointer_names_until_the_same_time_limit(canary):
    _, registry, redis = canary
    settings = TrainerSettings(canary_share=0.2, canary_seconds=60)
    successor = publisher_of(registry, redis, settings)
    version = successor.in_service()
    assert version.number == 1
    assert successor.watch.canary.figures()["gate_acceptance"] > 0
    assert successor.decide(time.monotonic() + 60).action == "roll_back"


def test_with_redis_gone_nothing_is_decided_until_it_is_back(canary):
    publisher, _, redis = canary
    late = time.monotonic() + 60
    moves, redis.moves, redis.answers = redis.moves, [], [RedisConnectionError("gone")]
    with pytest.raises(RedisConnectionError):
        publisher.decide(late)
    redis.moves = moves
    assert publisher.decide(late).action == "roll_back"
