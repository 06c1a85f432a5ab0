from __future__ import annotations

import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.learning.batch import collate
from osd.learning.gate import Gate
from osd.registry.pointer import Rollout
from osd.registry.versions import Registry
from tests.unit.learning.toys import Toy, make_trace
from trainer.rollout import Publisher


class Redis:
    """Pointer and events in memory; ``answers`` are given by ``get`` one after the other, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.moves = []
        self.told = []

    def get(self, domain):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def set(self, domain, rollout):
        self.moves.append(rollout)

    def add(self, kind, domain, version, **figures):
        self.told.append((kind, version))


STABLE = Rollout(1, None, 0.0, 1.0)


@pytest.fixture
def propose(tmp_path):
    def run(redis):
        torch.manual_seed(0)
        registry = Registry(tmp_path)
        if not registry.list("general"):
            registry.publish("general", Toy().weights(), Toy().config(), {})
        gate = Gate(depth=2, divergence="forward_kl", min_positions=10)
        publisher = Publisher("general", registry, redis, redis, gate, lambda config: Toy())
        candidate = Toy()
        candidate.load_weights(registry.load("general", 1).weights)
        batches = [collate([make_trace(completion=30)])]
        return publisher.propose(candidate, lambda: batches, {"steps": 1}), registry

    return run


def test_a_candidate_that_passes_is_published_and_put_in_service(propose):
    redis = Redis(STABLE)
    outcome, registry = propose(redis)
    assert outcome.version == 2
    assert [move.stable for move in redis.moves] == [2]
    assert registry.load("general", 2).manifest["parent"] == 1
    assert redis.told == [("published", 2)]


def test_a_pointer_that_somebody_moved_during_the_evaluation_is_left_alone(propose):
    redis = Redis(STABLE, STABLE, Rollout(1, None, 0.0, 2.0))
    outcome, registry = propose(redis)
    assert outcome.version is None
    assert outcome.verdict.waits
    assert redis.moves == []
    assert len(registry.list("general")) == 1


@pytest.mark.parametrize("before", [0, 2])
def test_without_redis_nothing_is_published(propose, before):
    redis = Redis(*[STABLE] * before, RedisConnectionError("gone"))
    with pytest.raises(RedisConnectionError):
        propose(redis)
    assert redis.moves == []


def test_without_any_version_in_service_a_candidate_waits(propose):
    outcome, _ = propose(Redis(None))
    assert outcome.verdict.waits
    assert "no drafter version of general to compare with" in outcome.verdict.reason
