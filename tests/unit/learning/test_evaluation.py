from __future__ import annotations

import msgspec
import pytest
import torch

from osd.learning.batch import collate
from osd.learning.evaluation import CachedScorer, Evaluation, ExpectedAcceptance, Scorer, evaluate
from osd.learning.gate import Gate
from tests.unit.learning.toys import VOCABULARY, Toy, gate_figures, make_trace, target_logits


class Known(Toy):
    """Drafter that equals the target at depth 0 and is uniform at depth 1."""

    def unroll(self, batch, depth, drafted=None):
        last = batch.token_ids[batch.sequence, batch.place - 1]
        return [torch.tensor(target_logits()).float()[last], torch.zeros(len(last), VOCABULARY)][:depth]


def test_acceptance_by_depth_is_the_mean_overlap():
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


def test_expected_acceptance_matches_the_chain_rule():
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


def test_expected_length_sums_products_and_bonus():
    figures = gate_figures((0.8, 0.5, 0.5))
    assert figures.accepted == pytest.approx(0.8 + 0.4 + 0.2)
    assert figures.acceptance == pytest.approx(1.4 / 3)
    assert figures.expected_length == pytest.approx(2.4)
    assert figures.summary()["per_depth"] == [0.8, 0.5, 0.5]


def test_kept_acceptance_of_greedy_requests_is_zero_or_one():
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
    """Noisy copy of the target, which is confident and often wrong."""

    def unroll(self, batch, depth, drafted=None):
        noise = torch.randn(target_logits().shape, generator=torch.Generator().manual_seed(3))
        logits = torch.tensor(target_logits()).float() + 2 * noise
        return [4 * logits[batch.token_ids[batch.sequence, batch.place - 1]]] * depth


def test_tail_counts_as_no_overlap():
    figures = evaluate(Known(), [collate([make_trace(top_k=2, completion=50)])], 1, "forward_kl")
    kept = collate([make_trace(top_k=2, completion=50)]).target_logp.exp().sum(1).mean().item()
    assert kept < 0.95
    assert figures.per_depth[0] == pytest.approx(kept, abs=2e-3)


@pytest.mark.parametrize("batches", [[], [collate([make_trace()])]])
def test_evaluation_keeps_the_mode_and_allows_no_batches(batches):
    drafter = Known().train()
    figures = evaluate(drafter, batches, 2, "forward_kl")
    assert drafter.training
    assert (figures.positions == 0) is (figures.expected_length == 1.0) is (not batches)


def test_sequence_without_positions_is_left_out_of_pairs():
    lengths = {"none": 1, "one": 2}
    short = [make_trace(name, prompt=1, completion=tokens) for name, tokens in lengths.items()]
    batch = collate([*short, make_trace("some")])
    evaluation = Evaluation(Scorer(Known(), 1, "forward_kl"))
    assert evaluation.add(batch).tolist() == pytest.approx([1.0, 1.0], abs=1e-3)
    assert (evaluation.sequences, evaluation.positions) == (3, 9)


class Counting(Toy):
    """Drafter near the target that counts the positions it predicts."""

    def __init__(self, share=0.5):
        super().__init__()
        self.predicted = 0
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor(target_logits()).float() * share)

    def unroll(self, batch, depth, drafted=None):
        self.predicted += batch.positions
        return super().unroll(batch, depth, drafted)


def traces(*numbers, **changes):
    return [make_trace(f"r{n}", completion=10 + n, seed=n, **changes) for n in numbers]


def assert_equal(first, second):
    torch.testing.assert_close(first.accepted, second.accepted)
    torch.testing.assert_close(first.divergence, second.divergence)


@pytest.fixture
def drafter():
    torch.manual_seed(0)
    return Counting()


def test_cached_record_is_not_scored_again(drafter):
    cached, plain = CachedScorer(drafter, 3, "forward_kl"), Scorer(drafter, 3, "forward_kl")
    first = [collate(traces(0, 1, 2)), collate(traces(3, 4))]
    for batch in first:
        assert_equal(cached.score(batch), plain.score(batch))
    predicted = drafter.predicted
    again = {numbers: cached.score(collate(traces(*numbers))) for numbers in ((0,), (1, 2, 3), (4, 0))}
    assert drafter.predicted == predicted
    for numbers, scores in again.items():
        assert_equal(scores, plain.score(collate(traces(*numbers))))


def test_other_part_of_a_record_is_scored(drafter):
    cached = CachedScorer(drafter, 2, "forward_kl")
    cached.score(collate(traces(1)))
    predicted = drafter.predicted
    cached.score(collate([make_trace("r1", completion=11, prompt=9, seed=1)]))
    cached.score(collate([make_trace("r1", segment=1, completion=11, seed=1)]))
    assert drafter.predicted == predicted + 22


def test_selected_positions_are_not_cached_as_the_record(drafter):
    cached = CachedScorer(drafter, 2, "forward_kl")
    batch = collate(traces(1))
    cached.score(batch)
    part = batch.select(torch.arange(4))
    assert cached.score(part).accepted.shape == (4, 2)


def test_repeated_gate_evaluates_only_the_candidate():
    torch.manual_seed(0)
    candidate, baseline = Counting(0.5), Counting(0.45)
    gate = Gate(2, "forward_kl", min_positions=50)
    cached = CachedScorer(baseline, 2, "forward_kl")
    batches = [collate(traces(n)) for n in range(8)]
    decisions = [gate.judge(candidate, cached, lambda: batches) for _ in range(2)]
    assert candidate.predicted == 2 * baseline.predicted
    assert decisions[0].figures() == gate.judge(candidate, baseline, lambda: batches).figures()
    assert decisions[0].figures() == decisions[1].figures()


def test_cache_drops_the_oldest_records(drafter):
    cached = CachedScorer(drafter, 1, "forward_kl")
    for n in range(1100):
        cached.score(collate([make_trace(f"s{n}", completion=2, top_k=VOCABULARY)]))
    predicted = drafter.predicted
    cached.score(collate([make_trace("s1099", completion=2)]))
    assert drafter.predicted == predicted
    cached.score(collate([make_trace("s0", completion=2)]))
    assert drafter.predicted == predicted + 2
