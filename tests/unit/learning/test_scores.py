"""Scores of positions, and those that are known already."""

from __future__ import annotations

import pytest
import torch

from osd.learning.batch import collate
from osd.learning.evaluation import KnownScores, Scorer
from osd.learning.gate import Gate
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace, target_logits


class Counting(Toy):
    """Knows something, and counts the positions that it was asked about."""

    def __init__(self, share=0.5):
        super().__init__()
        self.asked = 0
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor(target_logits()).float() * share)

    def unroll(self, batch, depth, drafted=None):
        self.asked += batch.positions
        return super().unroll(batch, depth, drafted)


def traces(*numbers, **changes):
    return [make_trace(f"r{n}", completion=10 + n, seed=n, **changes) for n in numbers]


def same(one, other):
    torch.testing.assert_close(one.accepted, other.accepted)
    torch.testing.assert_close(one.divergence, other.divergence)


@pytest.fixture
def drafter():
    torch.manual_seed(0)
    return Counting()


def test_a_record_that_was_scored_is_not_scored_again_whatever_it_stands_beside(drafter):
    known, fresh = KnownScores(drafter, 3, "forward_kl"), Scorer(drafter, 3, "forward_kl")
    first = [collate(traces(0, 1, 2)), collate(traces(3, 4))]
    for batch in first:
        same(known.score(batch), fresh.score(batch))
    asked = drafter.asked
    again = {numbers: known.score(collate(traces(*numbers))) for numbers in ((0,), (1, 2, 3), (4, 0))}
    assert drafter.asked == asked
    for numbers, scores in again.items():
        same(scores, fresh.score(collate(traces(*numbers))))


def test_another_part_of_a_record_is_another_record(drafter):
    known = KnownScores(drafter, 2, "forward_kl")
    known.score(collate(traces(1)))
    asked = drafter.asked
    known.score(collate([make_trace("r1", completion=11, prompt=9, seed=1)]))
    known.score(collate([make_trace("r1", segment=1, completion=11, seed=1)]))
    assert drafter.asked == asked + 22


def test_what_was_cut_out_of_a_batch_is_not_taken_for_the_whole_record(drafter):
    known = KnownScores(drafter, 2, "forward_kl")
    batch = collate(traces(1))
    known.score(batch)
    part = batch.select(torch.arange(4))
    assert known.score(part).accepted.shape == (4, 2)


def test_a_gate_that_is_asked_again_asks_only_the_candidate():
    torch.manual_seed(0)
    candidate, baseline = Counting(0.5), Counting(0.45)
    gate = Gate(2, "forward_kl", min_positions=50)
    known = KnownScores(baseline, 2, "forward_kl")
    batches = [collate(traces(n)) for n in range(8)]
    decisions = [gate.judge(candidate, known, lambda: batches) for _ in range(2)]
    assert candidate.asked == 2 * baseline.asked
    assert decisions[0].figures() == gate.judge(candidate, baseline, lambda: batches).figures()
    assert decisions[0].figures() == decisions[1].figures()


def test_no_more_than_so_many_records_are_kept(drafter):
    known = KnownScores(drafter, 1, "forward_kl")
    for n in range(1100):
        known.score(collate([make_trace(f"s{n}", completion=2, top_k=VOCABULARY)]))
    asked = drafter.asked
    known.score(collate([make_trace("s1099", completion=2)]))
    assert drafter.asked == asked
    known.score(collate([make_trace("s0", completion=2)]))
    assert drafter.asked == asked + 2
