from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.drafting.recall.snapshot import Snapshots
from osd.economy.effect import Effect
from osd.learning.batch import collate
from osd.learning.gate import Gate
from osd.recall.reference import PlainBackend
from osd.registry.events import Events
from osd.registry.lease import Lease
from osd.registry.pointer import Rollout
from osd.registry.pointer_file import FencedError, PointerFiles
from osd.registry.versions import Registry
from osd.target.identity import Identity
from tests.pointers import LockedHides
from tests.unit.learning.toys import Toy, make_trace
from tests.unit.trainer.traffic import live
from trainer.rollout import DomainVersions, Promotion


class FakeRedis(Events):
    """Pointer and events in memory; ``get`` returns ``answers`` in order and repeats the last one."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.moves = []
        self.events, self.recalled, self.costs, self.reasons = [], [], [], []

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
        self.reasons.append(figures.get("reason"))


def make_promotion(registry, redis, settings, keep=20):
    lease = Lease(PointerFiles(registry.root), "general")
    return Promotion(DomainVersions("general", registry, redis, redis, lease), settings, lambda config: Toy(), keep)


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
        promotion = make_promotion(registry, redis, settings)
        candidate = Toy()
        candidate.load_weights(registry.load("general", 1).weights)
        batches = [collate([make_trace(completion=30)])]

        def judge(candidate, baseline):
            return gate.judge(candidate, baseline, lambda: batches)

        manifest = {"trained_on": {"steps": 1}, "cost": {"core_seconds": 9.0}}
        return promotion.propose(candidate, judge, lambda decision: manifest), registry, promotion

    return run


def test_passed_candidate_becomes_the_stable_version(propose):
    redis = FakeRedis(STABLE)
    outcome, registry, _ = propose(redis)
    assert outcome.version == 2
    assert [move.stable for move in redis.moves] == [2]
    manifest = registry.load("general", 2).manifest
    assert (manifest["parent"], manifest["trained_on"]) == (1, {"steps": 1})
    assert redis.events == [("published", 2)]
    assert redis.costs == [9.0]


LOSS = Effect(-0.1, 0.01, 40)


def test_losing_version_is_taken_back_to_its_parent(propose):
    redis = FakeRedis(STABLE)
    _, _, promotion = propose(redis)
    assert (promotion.stable, promotion.parent) == (2, 1)
    promotion.take_back(LOSS)
    assert [(move.stable, move.canary) for move in redis.moves] == [(2, None), (1, None)]
    assert redis.events == [("published", 2), ("rolled_back", 1)]
    assert redis.reasons[-1].startswith("slower: speed -9.5% (")
    assert redis.reasons[-1].endswith(" against version 1")
    assert (promotion.stable, promotion.parent) == (1, None)
    promotion.take_back(LOSS)
    assert len(redis.moves) == 2, "the first version has no parent"


@pytest.mark.parametrize(
    "rollout", [Rollout(2, None, 0.0, 1.0, pinned=True), Rollout(1, None, 0.0, 2.0), Rollout(2, 3, 0.1, 2.0)],
    ids=["pinned", "moved", "canary"],
)  # fmt: skip
def test_losing_version_stays_where_the_pointer_forbids(propose, rollout):
    redis = FakeRedis(STABLE)
    _, _, promotion = propose(redis)
    redis.moves.append(rollout)
    promotion.take_back(LOSS)
    assert redis.moves[-1] == rollout
    assert redis.events == [("published", 2)]


def test_losing_version_stays_when_its_parent_was_removed(propose):
    redis = FakeRedis(STABLE)
    _, registry, promotion = propose(redis)
    shutil.rmtree(registry.root / "general" / "1")
    promotion.take_back(LOSS)
    assert len(redis.moves) == 1


@pytest.mark.parametrize("looks", [2, 3])  # until the end of the evaluation, and until the version is written
def test_pointer_moved_during_evaluation_stays(propose, looks):
    redis = FakeRedis(*[STABLE] * looks, Rollout(1, None, 0.0, 2.0))
    outcome, registry, promotion = propose(redis)
    assert (outcome.version, outcome.decision.waits, promotion.stable) == (None, True, 1)
    assert redis.moves == redis.events == []
    assert len(registry.list("general")) == looks - 1


def test_pinned_domain_keeps_its_version(propose):
    redis = FakeRedis(Rollout(1, None, 0.0, 1.0, pinned=True))
    outcome, registry, _ = propose(redis, share=0.2)
    assert outcome.decision.waits
    assert outcome.decision.reason == "version 1 is pinned"
    assert redis.moves == []
    assert len(registry.list("general")) == 1


@pytest.mark.parametrize("before", [0, 2])
def test_propose_without_redis_moves_no_pointer(propose, before):
    redis = FakeRedis(*[STABLE] * before, RedisConnectionError("gone"))
    with pytest.raises(RedisConnectionError):
        propose(redis)
    assert redis.moves == []


def test_candidate_waits_without_a_stable_version(propose):
    outcome, _, _ = propose(FakeRedis(None))
    assert outcome.decision.waits
    assert "no drafter version of general to compare with" in outcome.decision.reason


@pytest.fixture
def canary(propose):
    """Promotion with version 2 as canary, its registry, and the pointer."""
    redis = FakeRedis(STABLE)
    outcome, registry, promotion = propose(redis, share=0.2)
    assert outcome.version == 2
    return promotion, registry, redis


def add_requests(promotion, version, rate, requests=200):
    rng = np.random.default_rng(version)
    for _ in range(requests):
        promotion.watch.observe(live(rng, version, rate))


def test_passed_candidate_becomes_a_canary_first(canary):
    promotion, _, redis = canary
    (move,) = redis.moves
    assert (move.stable, move.canary, move.share) == (1, 2, 0.2)
    assert redis.events == [("canary", 2)]
    assert promotion.stable == 1
    assert promotion.decide(time.monotonic()).action == "watch"
    assert len(redis.moves) == 1


@pytest.mark.parametrize(
    ("rate", "action", "event"), [(0.5, "promote", ("promoted", 2)), (0.1, "roll_back", ("rolled_back", 1))]
)
def test_better_canary_is_promoted_and_worse_rolled_back(canary, rate, action, event):
    promotion, registry, redis = canary
    add_requests(promotion, 1, 0.3)
    add_requests(promotion, 2, rate)
    assert promotion.decide(time.monotonic()).action == action
    assert (redis.moves[-1].stable, redis.moves[-1].canary, redis.moves[-1].share) == (event[1], None, 0.0)
    assert redis.events[-1] == event
    assert promotion.stable == event[1]
    assert promotion.decide(time.monotonic()) is None
    assert registry.numbers("general") == [1, 2]


@pytest.mark.parametrize(("rate", "kind"), [(0.5, "promoted"), (0.1, "rolled_back")])
def test_rollout_event_names_the_recall_snapshot(propose, tmp_path, rate, kind):
    target, snapshots = Identity("target", "a", "b"), Snapshots(tmp_path)
    first = snapshots.write("general", PlainBackend().memory(8), target).sha256
    redis = FakeRedis(STABLE)
    _, registry, promotion = propose(redis, share=0.2)
    assert registry.load("general", 2).manifest["recall"] == first
    second = snapshots.write("general", PlainBackend().memory(16), target).sha256
    add_requests(promotion, 1, 0.3)
    add_requests(promotion, 2, rate)
    promotion.decide(time.monotonic())
    assert [event for event, _ in redis.events] == ["canary", kind]
    assert redis.recalled == [first, second]
    assert first != second


def test_canary_without_requests_ends_at_the_time_limit(canary):
    promotion, _, redis = canary
    began = time.monotonic()
    assert promotion.decide(began + 59).action == "watch"
    assert promotion.decide(began + 60).action == "roll_back"
    assert redis.moves[-1].stable == 1


def test_pointer_moved_by_an_operator_ends_the_trial(canary):
    promotion, _, redis = canary
    redis.moves.append(Rollout(2, None, 0.0, 5.0))
    add_requests(promotion, 1, 0.6)
    add_requests(promotion, 2, 0.2)
    assert promotion.decide(time.monotonic()).action == "watch"
    assert redis.moves[-1] == Rollout(2, None, 0.0, 5.0)
    assert promotion.watch.canary is None


def test_candidate_waits_while_a_canary_runs(canary):
    promotion, registry, _ = canary
    outcome = promotion.propose(Toy(), lambda: [], lambda decision: {})
    assert outcome.decision.waits
    assert outcome.decision.reason == "version 2 is still a canary"
    assert len(registry.list("general")) == 2


def test_successor_continues_the_trial_of_the_canary(canary):
    _, registry, redis = canary
    settings = TrainerSettings(canary_share=0.2, canary_seconds=60)
    successor = make_promotion(registry, redis, settings)
    version = successor.load_stable()
    assert version.number == 1
    assert successor.watch.canary.figures()["gate_acceptance"] > 0
    assert successor.decide(time.monotonic() + 60).action == "roll_back"


def test_canary_decision_waits_for_redis(canary):
    promotion, _, redis = canary
    late = time.monotonic() + 60
    moves, redis.moves, redis.answers = redis.moves, [], [RedisConnectionError("gone")]
    with pytest.raises(RedisConnectionError):
        promotion.decide(late)
    redis.moves = moves
    assert promotion.decide(late).action == "roll_back"


def test_trainer_removes_versions_under_lock_and_fence(tmp_path):
    registry = Registry(LockedHides(tmp_path))
    for parent in (None, 1, 2):
        registry.publish("general", Toy().weights(), Toy().config(), {"parent": parent})
    rollout = Rollout(3, None, 0.0, 1.0)
    replaced, successor = (make_promotion(registry, FakeRedis(rollout), TrainerSettings(), keep=1) for _ in range(2))
    for promotion in (replaced, successor):
        assert promotion.versions.lease.take(rollout)
        promotion.versions.lease.release()
    with pytest.raises(FencedError):
        replaced.retire()
    assert registry.numbers("general") == [1, 2, 3]
    assert successor.retire() == registry.numbers("general") == [2, 3]
