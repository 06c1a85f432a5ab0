from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import Array, TraceError, decode, encode
from osd.config import TrainerSettings
from osd.learning.batch import check, collate, cost, cut, pack
from osd.learning.distiller import Distiller
from osd.learning.targets import TopKTargets
from tests.unit.learning.toys import HIDDEN, VOCABULARY, Toy, Watched, make_trace, target_logits, with_rejections


def test_collate_aligns_targets_with_their_tokens():
    traces = [make_trace("a", prompt=3, completion=5, seed=1), make_trace("b", prompt=6, completion=2, seed=2)]
    batch = collate(traces)
    log_p = torch.tensor(target_logits()).log_softmax(-1)
    assert batch.place.tolist() == [3, 4, 5, 6, 7, 6, 7]
    assert batch.sequence.tolist() == [0] * 5 + [1] * 2
    for row in range(7):
        before = batch.token_ids[batch.sequence[row], batch.place[row] - 1]
        expected = log_p[before][batch.target_ids[row]]
        assert torch.allclose(batch.target_logp[row].double(), expected, atol=4e-3)


def test_collate_pads_tokens_and_hidden_states():
    traces = [make_trace("a", prompt=3, completion=5, seed=1), make_trace("b", prompt=2, completion=2, seed=2)]
    batch = collate(traces)
    assert batch.token_ids.shape == (2, 8)
    assert batch.lengths.tolist() == [8, 4]
    assert batch.positions == 7
    assert batch.token_ids[1, 4:].eq(0).all()
    assert batch.hidden.dtype == torch.float32
    states = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    assert torch.equal(batch.hidden[0, :7], states)
    assert batch.hidden[0, 7].eq(0).all()
    assert batch.hidden[1, 3:].eq(0).all()
    assert collate([traces[0], make_trace(hidden=False)]).hidden is None


def test_collate_renormalises_half_precision():
    batch = collate([make_trace(top_k=5, completion=40)])
    mass = batch.target_logp.exp().sum(1) + batch.target_tail.exp()
    assert torch.allclose(mass, torch.ones(40), atol=1e-6)


def test_collate_fills_missing_ids_with_minus_one():
    batch = collate([make_trace(top_k=3), make_trace(top_k=7)])
    assert batch.target_ids[0, 3:].eq(-1).all()
    assert batch.target_logp[0, 3:].exp().eq(0).all()


def test_put_replaces_all_ids_of_a_position():
    target = TopKTargets(1, 2)
    for ids, chances in (([[3, 4]], [[0.5, 0.25]]), ([[5]], [[0.5]])):
        target.put(np.array([0]), np.array(ids), np.log(chances), np.log([0.25]))
    ids, logp, tail = target.tensors()
    assert ids.tolist() == [[5, -1]]
    assert [*logp.exp()[0].tolist(), *tail.exp().tolist()] == pytest.approx([2 / 3, 0.0, 1 / 3])


def test_rows_at_requires_a_hidden_state():
    batch = collate([make_trace(prompt=1, completion=4)])
    assert batch.place.tolist() == [1, 2, 3, 4]
    assert batch.rows_at(0).tolist() == [False, True, True, True]
    assert batch.rows_at(2).tolist() == [False, False, False, True]


def test_pack_limits_cost_and_keeps_every_position():
    traces = [make_trace(str(n), prompt=3 + n, completion=4 + 5 * n, seed=n) for n in range(9)]
    groups = list(pack(traces, 32))
    for group in groups:
        assert len(group) * max(cost(trace) for trace in group) <= 32
    parts = [part for group in groups for part in group]
    for trace in traces:
        pieces = [p.completion_ids.numpy() for p in parts if p.request_id == trace.request_id]
        assert np.array_equal(np.concatenate(pieces), trace.completion_ids.numpy())
    assert len(groups) < len(parts)


def test_cut_keeps_the_tokens_before_its_positions():
    trace = msgspec.structs.replace(make_trace(prompt=60, completion=30), completes=True)
    part = cut(trace, 12, 9)
    assert not part.completes, "the prompt of the part has generated tokens"
    tokens = np.concatenate([trace.prompt_ids.numpy(), trace.completion_ids.numpy()])
    assert np.array_equal(np.concatenate([part.prompt_ids.numpy(), part.completion_ids.numpy()]), tokens[21:75])
    assert np.array_equal(part.completion_ids.numpy(), tokens[69:75])
    assert np.array_equal(part.target_ids.numpy(), trace.target_ids.numpy()[9:15])
    assert np.array_equal(part.hidden.numpy(), trace.hidden.numpy()[21:74])
    assert cost(part) == 12
    part.check()
    short = make_trace(prompt=4)
    assert cut(short, 12, 0).prompt_ids == short.prompt_ids
    assert cut(trace, 12, 0).completes


@pytest.mark.parametrize(("change", "message"), [
    ({"target_logp": Array.of(np.full((8, VOCABULARY), np.nan, np.float16))}, "do not sum to one"),
    ({"target_tail": Array.of(np.zeros(8, np.float16))}, "do not sum to one"),
    ({"target_ids": Array.of(np.full((8, VOCABULARY), 99, np.int32))}, "target_ids has an id outside"),
    ({"prompt_ids": Array.of(np.full(4, -1, np.int32))}, "prompt_ids has an id outside"),
    ({"drafted": Array.of(np.full(8, VOCABULARY, np.int32))}, "drafted has an id outside"),
    ({"prompt_ids": Array.of(np.array([], np.int32))}, "empty prompt"),
    ({"target_logp": Array.of(np.zeros((8, 2), np.float16))}, "do not match"),
    ({"hidden": None}, "the record has none"),
    ({"hidden": Array.of(np.zeros((11, 3), np.float16))}, r"the record has \(11, 3\)"),
    ({"hidden": Array.of(np.full((11, HIDDEN), np.inf, np.float16))}, "not finite"),
    ({"after_ids": Array.of(np.full((4, VOCABULARY), VOCABULARY, np.int32))}, "after_ids has an id outside"),
    ({"after_logp": Array.of(np.full((4, VOCABULARY), -9, np.float16))}, "after_logp and after_tail do not sum"),
    ({"after_logp": Array.of(np.zeros((4, 2), np.float16))}, "do not match"),
])  # fmt: skip
def test_check_refuses_an_invalid_record(change, message):
    trace = rejected() if any(name.startswith("after") for name in change) else make_trace()
    check(trace, VOCABULARY, HIDDEN)
    with pytest.raises(TraceError, match=message):
        check(msgspec.structs.replace(trace, **change), VOCABULARY, HIDDEN)


def test_check_without_taps_needs_no_hidden_states():
    check(make_trace(hidden=False), VOCABULARY, 0)


PLACES, DRAWN = [1, 4, 5, 9], [3, 0, 7, 11]


def rejected(seed=0):
    trace = make_trace(prompt=4, completion=10, seed=seed)
    true = trace.completion_ids.numpy()[PLACES]
    return with_rejections(
        trace,
        PLACES,
        [token if token != true_token else token - 1 for token, true_token in zip(DRAWN, true, strict=True)],
    )


def test_on_policy_targets_follow_rejected_tokens():
    traces = [make_trace(prompt=2, completion=3, seed=4), rejected()]
    batch = collate(traces)
    on_policy = batch.on_policy
    changed = (on_policy.token_ids != batch.token_ids).nonzero().tolist()
    assert changed == [[1, 4 + place] for place in PLACES]
    log_p = torch.tensor(target_logits()).log_softmax(-1)
    for row in range(batch.positions):
        before = on_policy.token_ids[batch.sequence[row], batch.place[row] - 1]
        expected = log_p[before][on_policy.target_ids[row]]
        assert torch.allclose(on_policy.target_logp[row].double(), expected, atol=4e-3)
    behind = (on_policy.target_ids != batch.target_ids).any(1).nonzero().squeeze(1).tolist()
    assert behind == [3 + 1 + place for place in PLACES if place + 1 < 10]


def test_on_policy_rows_end_at_a_rejected_token():
    on_policy = collate([rejected()]).on_policy
    behind = {place + 1 for place in PLACES}
    for depth in (1, 2, 3, 4):
        for place in range(10):
            possible = not behind & set(range(place - depth + 1, place))
            assert bool(on_policy.rows_at(depth)[place]) == possible, (place, depth)


def test_cut_keeps_on_policy_targets():
    trace = rejected()
    whole = collate([trace]).on_policy
    for first in range(10):
        part = cut(trace, 8, first)
        msgspec.structs.replace(part, hidden=None).check()
        on_policy = collate([part]).on_policy
        count = part.completion_ids.shape[0]
        # The first position of a part does not know that the token before it was rejected.
        known = slice(1, count)
        assert torch.equal(on_policy.target_ids[known], whole.target_ids[first : first + count][known])
        torch.testing.assert_close(on_policy.target_logp[known], whole.target_logp[first : first + count][known])


def test_collate_mixes_records_with_and_without_rejections():
    assert collate([make_trace()]).on_policy is None
    mixed = collate([make_trace(seed=1), rejected()])
    assert torch.equal(mixed.on_policy.token_ids[0], mixed.token_ids[0])


@pytest.mark.parametrize(("change", "message"), [
    ({"after_ids": None}, "rows for 4 rejected"),
    ({"after_tail": Array.of(np.zeros(3, np.float16))}, "rows for 4 rejected"),
])  # fmt: skip
def test_record_with_mismatched_arrays_is_refused(change, message):
    with pytest.raises(TraceError, match=message):
        decode(encode(msgspec.structs.replace(rejected(), **change)))


def test_steps_read_the_tokens_of_the_samples_setting():
    data = collate([rejected()])
    sources: dict[Literal["teacher", "student", "mixed"], list[str]] = {
        "teacher": ["target"] * 4,
        "student": ["drafter"] * 4,
        "mixed": ["target", "drafter", "target", "drafter"],
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


def test_student_loss_uses_targets_after_its_tokens():
    class Fixed(Toy):
        """Equals the target after the tokens that it reads, and differs at depth 2."""

        def unroll(self, batch, depth, drafted=None):
            table = torch.tensor(target_logits()).float()
            first, second = (t[batch.sequence, batch.place - 1] for t in (batch.token_ids, drafted))
            return [table[first] + 0 * self.read.weight.sum(), table[second], table[first]][:depth]

    data = collate([rejected()])
    right = Distiller(Fixed(), TrainerSettings(samples="student", unroll=2)).step(data).loss
    assert right == pytest.approx(0, abs=1e-4)
    deeper = Distiller(Fixed(), TrainerSettings(samples="student", unroll=3)).step(data).loss
    on_policy = data.on_policy
    behind = (on_policy.target_ids != data.target_ids).any(1)
    assert bool((behind & on_policy.rows_at(2)).any())
    assert deeper > 0.01


def test_student_samples_need_two_unrolled_steps():
    with pytest.raises(ValueError, match="at least 2 where"):
        TrainerSettings(samples="mixed", unroll=1)
    TrainerSettings(samples="teacher", unroll=1)
