"""What a drafter drew itself, in the place of the target's tokens."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import Array, TraceError, decode, encode
from osd.config import TrainerSettings
from osd.learning.batch import check, collate, cut
from osd.learning.distiller import Distiller
from tests.unit.learning.toys import HIDDEN, VOCABULARY, Toy, Watched, make_trace, target_logits, with_rejections

PLACES, DRAWN = [1, 4, 5, 9], [3, 0, 7, 11]


def rejected(seed=0):
    trace = make_trace(prompt=4, completion=10, seed=seed)
    true = trace.completion_ids.numpy()[PLACES]
    return with_rejections(
        trace, PLACES, [own if own != told else own - 1 for own, told in zip(DRAWN, true, strict=True)]
    )


def test_places_behind_a_rejected_token_get_its_distribution_and_all_others_keep_theirs():
    traces = [make_trace(prompt=2, completion=3, seed=4), rejected()]
    batch = collate(traces)
    own = batch.own
    assert own is not None
    changed = (own.token_ids != batch.token_ids).nonzero().tolist()
    assert changed == [[1, 4 + place] for place in PLACES]
    log_p = torch.tensor(target_logits()).log_softmax(-1)
    for row in range(batch.positions):
        before = own.token_ids[batch.sequence[row], batch.place[row] - 1]
        expected = log_p[before][own.target_ids[row]]
        assert torch.allclose(own.target_logp[row].double(), expected, atol=4e-3)
    behind = (own.target_ids != batch.target_ids).any(1).nonzero().squeeze(1).tolist()
    assert behind == [3 + 1 + place for place in PLACES if place + 1 < 10]


def test_nothing_of_the_targets_follows_a_rejected_token_within_a_draft():
    own = collate([rejected()]).own
    assert own is not None
    behind = {place + 1 for place in PLACES}
    for depth in (1, 2, 3, 4):
        for place in range(10):
            possible = not behind & set(range(place - depth + 1, place))
            assert bool(own.rows_at(depth)[place]) == possible, (place, depth)


def test_a_part_of_a_record_keeps_what_belongs_to_it():
    trace = rejected()
    whole = collate([trace]).own
    for first in range(10):
        part = cut(trace, 8, first)
        msgspec.structs.replace(part, hidden=None).check()
        own = collate([part]).own
        count = part.completion_ids.shape[0]
        assert own is not None
        assert whole is not None
        # The first place of a part does not know that the token before it was rejected.
        known = slice(1, count)
        assert torch.equal(own.target_ids[known], whole.target_ids[first : first + count][known])
        torch.testing.assert_close(own.target_logp[known], whole.target_logp[first : first + count][known])


def test_records_with_and_without_share_a_batch():
    assert collate([make_trace()]).own is None
    mixed = collate([make_trace(seed=1), rejected()])
    assert mixed.own is not None
    assert torch.equal(mixed.own.token_ids[0], mixed.token_ids[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"after_ids": None}, "rows for 4 rejected"),
        ({"after_tail": Array.of(np.zeros(3, np.float16))}, "rows for 4 rejected"),
    ],
)
def test_a_record_whose_arrays_do_not_fit_is_no_record(change, message):
    with pytest.raises(TraceError, match=message):
        decode(encode(msgspec.structs.replace(rejected(), **change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"after_ids": Array.of(np.full((4, VOCABULARY), VOCABULARY, np.int32))}, "after_ids has an id outside"),
        ({"after_logp": Array.of(np.full((4, VOCABULARY), -9, np.float16))}, "after_logp and after_tail do not add"),
        ({"after_logp": Array.of(np.zeros((4, 2), np.float16))}, "do not fit"),
    ],
)
def test_a_record_that_cannot_be_learned_from_is_refused_with_the_reason(change, message):
    check(rejected(), VOCABULARY, HIDDEN)
    with pytest.raises(TraceError, match=message):
        check(msgspec.structs.replace(rejected(), **change), VOCABULARY, HIDDEN)


def test_steps_are_over_the_text_that_the_setting_names():
    data = collate([rejected()])
    sources: dict[Literal["teacher", "student", "mixed"], list[str]] = {
        "teacher": ["target"] * 4,
        "student": ["own"] * 4,
        "mixed": ["target", "own", "target", "own"],
    }
    for samples, expected in sources.items():
        drafter = Watched()
        distiller = Distiller(drafter, TrainerSettings(samples=samples))
        for _ in expected:
            distiller.step(data)
        assert [tokens for _, tokens in drafter.unrolled] == expected
    drafter = Watched()
    Distiller(drafter, TrainerSettings(samples="student")).step(collate([make_trace()]))
    assert [tokens for _, tokens in drafter.unrolled] == ["target"]


def test_the_loss_behind_a_rejected_token_is_that_of_the_drafters_own():
    class Fixed(Toy):
        """Says what the target says, after the tokens that it is told to read, and something else at depth 2."""

        def unroll(self, batch, depth, drafted=None):
            table = torch.tensor(target_logits()).float()
            first, other = (t[batch.sequence, batch.place - 1] for t in (batch.token_ids, drafted))
            return [table[first] + 0 * self.read.weight.sum(), table[other], table[first]][:depth]

    data = collate([rejected()])
    right = Distiller(Fixed(), TrainerSettings(samples="student", unroll=2)).step(data).loss
    assert right == pytest.approx(0, abs=1e-4)
    deeper = Distiller(Fixed(), TrainerSettings(samples="student", unroll=3)).step(data).loss
    own = data.own
    assert own is not None
    behind = (own.target_ids != data.target_ids).any(1)
    assert bool((behind & own.rows_at(2)).any())
    assert deeper > 0.01


def test_it_takes_a_second_step_to_read_anything():
    with pytest.raises(ValueError, match="at least 2 where"):
        TrainerSettings(samples="mixed", unroll=1)
    TrainerSettings(samples="teacher", unroll=1)
