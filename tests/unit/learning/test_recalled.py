"""What recall leaves open decides how much a position counts when a trained drafter is judged."""

from __future__ import annotations

import msgspec
import pytest
import torch

from osd.capture.trace import Trace
from osd.config import RecallSettings
from osd.learning.batch import collate
from osd.learning.evaluation import evaluate
from osd.learning.recalled import Recalled
from tests.unit.learning.test_online import COMPLETION, NAMES, learner
from tests.unit.learning.toys import Toy, make_trace

SMALL = RecallSettings(megabytes=1)


KNOWN, OTHER = (make_trace(name, completion=COMPLETION, seed=seed) for name, seed in (("a", 1), ("b", 77)))


def teach(recalled: Recalled, *traces: Trace) -> None:
    for trace in traces:
        recalled.learn(trace)
    while recalled.catch_up():
        pass


def test_what_was_said_before_is_not_left_open_and_what_was_not_is() -> None:
    recalled = Recalled(SMALL)
    before = recalled.leaves(collate([KNOWN]))
    assert before.shape == (COMPLETION,)
    teach(recalled, *[KNOWN] * 40)
    after, elsewhere = recalled.leaves(collate([KNOWN])), recalled.leaves(collate([OTHER]))
    assert float(after.mean()) < 0.5 * float(before.mean())
    assert float(elsewhere.mean()) > float(after.mean())
    assert torch.equal(recalled.leaves(collate([OTHER])), elsewhere), "asking teaches nothing"
    together = recalled.leaves(collate([OTHER, KNOWN]))
    assert torch.allclose(together, torch.cat([elsewhere, after]))


def test_where_a_request_is_greedy_a_place_is_known_or_not_and_where_it_draws_in_part() -> None:
    recalled = Recalled(SMALL)
    drawn = [KNOWN, OTHER]
    greedy = [msgspec.structs.replace(trace, temperature=0.0) for trace in drawn]
    teach(recalled, *[KNOWN] * 40)
    shares, whole = recalled.leaves(collate(drawn)), recalled.leaves(collate(greedy))
    assert set(whole.tolist()) == {0.0, 1.0}
    known, other = whole.view(2, -1).mean(1).tolist()
    assert known < 0.1 < other
    assert ((shares > 0) & (shares < 1) & (whole == 0)).any(), "what is most probable need not be certain"
    mixed = recalled.leaves(collate([greedy[0], drawn[1]]))
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


def test_a_candidate_that_learnt_only_what_recall_knows_is_not_better_where_it_counts() -> None:
    """The same records make the table and the drafter: beside recall, nearly nothing is left to gain."""
    alone, beside = learner(), learner(recalled=Recalled(SMALL))
    for it in (alone, beside):
        for name in NAMES:
            it.add(make_trace(name, completion=COMPLETION, seed=3))  # one text, again and again
    first, second = (it.propose(Toy()) for it in (alone, beside))
    assert first.candidate.weight == 1.0
    assert second.candidate.weight < 0.5
    assert second.figures()["weight"] == pytest.approx(second.candidate.weight, abs=1e-4)


def test_what_is_too_old_or_purged_is_forgotten() -> None:
    recalled = Recalled(SMALL)
    old, new = (msgspec.structs.replace(one, created=made) for one, made in ((KNOWN, 1000.0), (OTHER, 2000.0)))
    for learnt in (True, False):
        for trace in (old, new):
            recalled.learn(trace)
        while learnt and recalled.catch_up():
            pass
        assert bool(recalled.expire(1500.0)) is learnt
        assert recalled.expire(1500.0) == 0
        assert bool(recalled.forget("b")) is learnt
        assert recalled.forget("b") == 0
        assert not recalled.catch_up(), "nor is what had not been learnt yet"


def test_as_many_records_wait_as_there_is_room_for_and_the_newest_are_learnt() -> None:
    recalled = Recalled(SMALL)
    teach(recalled, KNOWN, *[OTHER] * 1024)
    first, second = (float(recalled.leaves(collate([trace])).mean()) for trace in (KNOWN, OTHER))
    assert second < 0.5 * first
