from __future__ import annotations

import msgspec
import pytest
import torch

from osd.learning.batch import collate
from osd.learning.evaluation import Evaluation, ExpectedAcceptance, KnownScores, Scorer, evaluate
from osd.learning.gate import Gate
from tests.unit.learning.toys import VOCABULARY, Toy, gate_figures, make_trace, target_logits


class Known(Toy):
    """The target itself at depth 0, uniform at depth 1."""

    def unroll(self, batch, depth, drafted=None):
        last = batch.token_ids[batch.sequence, batch.place - 1]
        return [torch.tensor(target_logits()).float()[last], torch.zeros(len(last), VOCABULARY)][:depth]


def test_acceptance_by_depth_is_the_mean_overlap_of_the_distributions():
    batches = [collate([make_trace(f"{n}", completion=20, seed=n), make_trace(f"x{n}", seed=50 + n)]) for n in range(3)]
    figures = evaluate(Known(), batches, 2, "forward_kl")
    p = torch.cat([torch.tensor(target_logits()).softmax(-1)[b.token_ids[b.sequence, b.place - 1]] for b in batches])
    uniform = torch.minimum(p, torch.tensor(1 / VOCABULARY)).sum(1).mean().item()
    assert figures.positions == 84
    assert figures.per_depth == pytest.approx((1.0, uniform), abs=2e-3)
    assert figures.divergence == pytest.approx(0.0, abs=1e-3)
    assert figures.overlaps.mean().item() == pytest.approx((1 + uniform) / 2, abs=2e-3)
    assert figures.groups.max() == 5
    assert figures.groups.bincount().tolist() == [20, 8] * 3


def test_expected_acceptance_is_how_often_the_chain_rule_accepts_where_a_depth_is_reached():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 9, 2, 6, generator=generator).softmax(-1)  # [positions, depth, vocab]
    valid = torch.tensor([[True, True], [True, False], [False, False]]).repeat(3, 1)
    metric = ExpectedAcceptance(3)
    chance = torch.cat([torch.minimum(p, q).sum(-1), torch.full((9, 1), torch.nan)], 1)
    reached = torch.cat([valid, torch.zeros(9, 1, dtype=torch.bool)], 1)
    metric.update(chance[:4], reached[:4], torch.ones(4, dtype=torch.float64))
    metric.update(chance[4:], reached[4:], torch.ones(5, dtype=torch.float64))
    tokens = torch.multinomial(q.flatten(0, 1), 20_000, replacement=True, generator=generator)
    kept = torch.rand(tokens.shape, generator=generator) < (p / q).flatten(0, 1).gather(1, tokens)
    share = kept.double().mean(1).view(9, 2)
    by_depth = [share[valid[:, depth], depth].mean().item() for depth in range(2)]
    assert metric.compute().tolist() == pytest.approx([*by_depth, 0.0], abs=0.01)


def test_expected_length_is_the_sum_of_the_products_of_acceptances_and_the_bonus():
    figures = gate_figures((0.8, 0.5, 0.5))
    assert figures.accepted == pytest.approx(0.8 + 0.4 + 0.2)
    assert figures.acceptance == pytest.approx(1.4 / 3)
    assert figures.expected_length == pytest.approx(2.4)
    assert figures.summary()["per_depth"] == [0.8, 0.5, 0.5]


def test_a_greedy_request_keeps_the_first_choice_or_nothing_and_one_that_draws_what_both_share():
    traces = [make_trace(f"{n}", completion=20, seed=n) for n in range(4)]
    greedy = [msgspec.structs.replace(trace, temperature=0.0) for trace in traces]
    drafter = Uncertain()
    drawn, taken = (evaluate(drafter, [collate(part)], 1, "forward_kl") for part in (traces, greedy))
    assert drawn.kept_per_depth == drawn.per_depth == taken.per_depth
    batch = collate(greedy)
    first = target_logits().argmax(1)[batch.token_ids[batch.sequence, batch.place - 1]]
    right = drafter.unroll(batch, 1)[0].argmax(-1).numpy() == first
    assert 0.2 < right.mean() < 0.9
    assert taken.kept_per_depth == pytest.approx((right.mean(),))


class Uncertain(Toy):
    """The target in a fog, which is sure of its first choice and often wrong."""

    def unroll(self, batch, depth, drafted=None):
        fog = torch.randn(target_logits().shape, generator=torch.Generator().manual_seed(3))
        logits = torch.tensor(target_logits()).float() + 2 * fog
        return [4 * logits[batch.token_ids[batch.sequence, batch.place - 1]]] * depth


def test_the_tail_counts_as_no_overlap():
    figures = evaluate(Known(), [collate([make_trace(top_k=2, completion=50)])], 1, "forward_kl")
    kept = collate([make_trace(top_k=2, completion=50)]).target_logp.exp().sum(1).mean().item()
    assert kept < 0.95
    assert figures.per_depth[0] == pytest.approx(kept, abs=2e-3)


@pytest.mark.parametrize("batches", [[], [collate([make_trace()])]])
def test_evaluation_leaves_the_drafter_in_its_mode_and_gives_zeros_of_nothing(batches):
    drafter = Known().train()
    figures = evaluate(drafter, batches, 2, "forward_kl")
    assert drafter.training
    assert (figures.positions == 0) is (figures.expected_length == 1.0) is (not batches)


def test_a_sequence_without_a_position_to_predict_is_left_out_of_the_pairs():
    lengths = {"none": 1, "one": 2}
    short = [make_trace(name, prompt=1, completion=tokens) for name, tokens in lengths.items()]
    batch = collate([*short, make_trace("some")])
    evaluation = Evaluation(Scorer(Known(), 1, "forward_kl"))
    assert evaluation.add(batch).tolist() == pytest.approx([1.0, 1.0], abs=1e-3)
    assert (evaluation.sequences, evaluation.positions) == (3, 9)


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
