"""Recall of the trainer, and its weights of positions in gate decisions."""

from __future__ import annotations

import msgspec
import pytest
import torch

from osd.capture.trace import Trace
from osd.config import RecallSettings
from osd.learning.batch import collate
from osd.learning.evaluation import evaluate
from osd.learning.trainer_recall import TrainerRecall
from tests.unit.learning.test_online import COMPLETION, NAMES, learner
from tests.unit.learning.toys import Toy, make_trace

SMALL = RecallSettings(megabytes=1)


KNOWN, OTHER = (make_trace(name, completion=COMPLETION, seed=seed) for name, seed in (("a", 1), ("b", 77)))


def teach(recall: TrainerRecall, *traces: Trace) -> None:
    for trace in traces:
        recall.learn(trace)
    while recall.catch_up():
        pass


def test_miss_probability_falls_after_learning() -> None:
    recall = TrainerRecall(SMALL)
    before = recall.miss_probability(collate([KNOWN]))
    assert before.shape == (COMPLETION,)
    teach(recall, *[KNOWN] * 40)
    after, other = recall.miss_probability(collate([KNOWN])), recall.miss_probability(collate([OTHER]))
    assert float(after.mean()) < 0.5 * float(before.mean())
    assert float(other.mean()) > float(after.mean())
    assert torch.equal(recall.miss_probability(collate([OTHER])), other), "the call teaches nothing"
    together = recall.miss_probability(collate([OTHER, KNOWN]))
    assert torch.allclose(together, torch.cat([other, after]))


def test_greedy_miss_probability_is_zero_or_one() -> None:
    recall = TrainerRecall(SMALL)
    drawn = [KNOWN, OTHER]
    greedy = [msgspec.structs.replace(trace, temperature=0.0) for trace in drawn]
    teach(recall, *[KNOWN] * 40)
    shares, whole = recall.miss_probability(collate(drawn)), recall.miss_probability(collate(greedy))
    assert set(whole.tolist()) == {0.0, 1.0}
    known, other = whole.view(2, -1).mean(1).tolist()
    assert known < 0.1 < other
    assert ((shares > 0) & (shares < 1) & (whole == 0)).any(), "the most probable token need not be certain"
    mixed = recall.miss_probability(collate([greedy[0], drawn[1]]))
    assert torch.equal(mixed, torch.cat([whole[:COMPLETION], shares[COMPLETION:]]))


def test_positions_count_by_their_weights() -> None:
    torch.manual_seed(0)
    drafter, batch = Toy(), collate([make_trace("a", completion=COMPLETION, seed=1)])
    plain = evaluate(drafter, [batch], 2, "forward_kl")
    batch.weight = torch.zeros(COMPLETION, dtype=torch.float64)
    batch.weight[5] = 0.5
    alone = evaluate(drafter, [batch], 2, "forward_kl")
    assert plain.weight == 1.0
    assert alone.weight == pytest.approx(0.5 / COMPLETION, rel=0.1)
    assert alone.positions == plain.positions
    assert alone.overlaps.count_nonzero() == 1
    assert float(alone.overlaps.sum()) == pytest.approx(0.5 * sum(alone.per_depth) / 2)


def test_recall_reduces_the_weight_of_candidates() -> None:
    # Recall and drafter learn the same text, so recall predicts most positions.
    alone, mixed = learner(), learner(recall=TrainerRecall(SMALL))
    for it in (alone, mixed):
        for name in NAMES:
            it.add(make_trace(name, completion=COMPLETION, seed=3))  # equal texts
    first, second = (it.propose(Toy()) for it in (alone, mixed))
    assert first.candidate.weight == 1.0
    assert second.candidate.weight < 0.5
    assert second.figures()["weight"] == pytest.approx(second.candidate.weight, abs=1e-4)


def test_old_and_purged_records_are_forgotten() -> None:
    recall = TrainerRecall(SMALL)
    old, new = (
        msgspec.structs.replace(trace, created=created) for trace, created in ((KNOWN, 1000.0), (OTHER, 2000.0))
    )
    for learnt in (True, False):
        for trace in (old, new):
            recall.learn(trace)
        while learnt and recall.catch_up():
            pass
        assert bool(recall.expire(1500.0)) is learnt
        assert recall.expire(1500.0) == 0
        assert bool(recall.forget("b")) is learnt
        assert recall.forget("b") == 0
        assert not recall.catch_up(), "waiting records are forgotten too"


def test_queue_keeps_the_newest_records() -> None:
    recall = TrainerRecall(SMALL)
    teach(recall, KNOWN, *[OTHER] * 1024)
    first, second = (float(recall.miss_probability(collate([trace])).mean()) for trace in (KNOWN, OTHER))
    assert second < 0.5 * first
