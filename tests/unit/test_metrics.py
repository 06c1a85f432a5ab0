from __future__ import annotations

import numpy as np
import pytest
import torch

from osd.metrics import (
    AcceptanceRate,
    ExpectedAcceptance,
    MeanAcceptanceLength,
    PerPositionAcceptance,
    acceptance_rate,
    expected_acceptance,
    mean_acceptance_length,
    per_position_acceptance,
)

DRAFTED = torch.tensor([4, 4, 2, 0, 3, 4])
ACCEPTED = torch.tensor([4, 1, 2, 0, 0, 3])


def fed_in_two_parts(metric, *values):
    metric.update(*(value[:2] for value in values))
    metric.update(*(value[2:] for value in values))
    return metric.compute()


def test_acceptance_rate_is_accepted_per_drafted_token_not_the_mean_over_rounds():
    assert acceptance_rate(ACCEPTED, DRAFTED).item() == pytest.approx(10 / 17)
    assert fed_in_two_parts(AcceptanceRate(), ACCEPTED, DRAFTED).item() == pytest.approx(10 / 17)


def test_mean_acceptance_length_counts_the_bonus_token():
    assert mean_acceptance_length(ACCEPTED).item() == pytest.approx(np.mean([a + 1 for a in ACCEPTED.tolist()]))
    assert fed_in_two_parts(MeanAcceptanceLength(), ACCEPTED).item() == pytest.approx(1 + 10 / 6)


def test_per_position_acceptance_counts_only_rounds_that_drafted_the_position():
    reference = []
    for position in range(5):
        tried = [(a, d) for a, d in zip(ACCEPTED.tolist(), DRAFTED.tolist(), strict=True) if d > position]
        reference.append(sum(a > position for a, _ in tried) / len(tried) if tried else 0.0)
    assert per_position_acceptance(ACCEPTED, DRAFTED, 5).tolist() == pytest.approx(reference)
    assert fed_in_two_parts(PerPositionAcceptance(5), ACCEPTED, DRAFTED).tolist() == pytest.approx(reference)


def test_expected_acceptance_is_how_often_the_chain_rule_accepts():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 8, 6, generator=generator).softmax(-1)
    expected = expected_acceptance(p, q)
    tokens = torch.multinomial(q, 20_000, replacement=True, generator=generator)
    kept = torch.rand(tokens.shape, generator=generator) < (p / q).gather(1, tokens)
    assert torch.allclose(kept.double().mean(1), expected.double(), atol=0.02)
    assert fed_in_two_parts(ExpectedAcceptance(), p, q).item() == pytest.approx(expected.mean().item(), abs=1e-6)
    assert expected_acceptance(p, p).tolist() == pytest.approx([1.0] * 8)


def test_metrics_that_saw_no_round_have_a_value():
    none = torch.zeros(0, dtype=torch.int64)
    assert fed_in_two_parts(AcceptanceRate(), none, none).item() == 0.0
    assert fed_in_two_parts(MeanAcceptanceLength(), none).item() == 1.0
    assert fed_in_two_parts(PerPositionAcceptance(2), none, none).tolist() == [0.0, 0.0]
    assert fed_in_two_parts(ExpectedAcceptance(), torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0


def test_reset_forgets():
    metric = AcceptanceRate()
    metric.update(ACCEPTED, DRAFTED)
    metric.reset()
    metric.update(torch.tensor([1]), torch.tensor([2]))
    assert metric.compute().item() == 0.5
