from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, SamplingParams, draw


def batch(*settings: tuple[float, ...]) -> SamplingBatch:
    """Return the batch of tuples of temperature, top-k, top-p and optionally min-p."""
    return SamplingBatch.of([SamplingParams(*values) for values in settings])


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Return a row of probabilities by transformers' warpers."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores, ids = logits[None].float(), torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)[0]


SETTINGS = [
    (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.9), (0.5, 40, 0.6), (1.0, 1, 1.0), (2.0, 0, 1e-6), (1.0, 10**6, 0.99),
    (1.0, 0, 1.0, 0.1), (1.5, 0, 1.0, 0.05), (1.2, 30, 0.8, 0.02), (1.0, 0, 0.7, 0.01), (0.8, 3, 1.0, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("vocabulary", [7, 3000])
@pytest.mark.parametrize("coarse", [False, True])
def test_probabilities_equal_transformers_warpers(vocabulary: int, coarse: bool) -> None:
    logits = torch.randn(len(SETTINGS), vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    if coarse:
        logits = logits.round()  # many equal logits, as from bf16
    result = batch(*SETTINGS).probabilities(logits)
    for row, setting in enumerate(SETTINGS):
        alone = batch(setting).probabilities(logits[row, None])[0]
        assert torch.equal(alone, result[row]), "other settings of the batch must not matter"
        expected = reference(logits[row], *setting)
        if coarse:  # on ties transformers keeps other tokens, but as many
            assert torch.allclose(result[row].sort().values, expected.sort().values, atol=1e-6), setting
        else:
            assert torch.equal(result[row] > 0, expected > 0), setting
            assert torch.allclose(result[row], expected, atol=1e-6), setting


def test_top_p_keeps_the_lowest_ids_on_ties() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, -1.0]).log_softmax(-1)[None]
    result = batch((1.0, 0, 0.5)).probabilities(logits)
    assert (result[0] > 0).tolist() == [False, True, True, True, False, False]


def test_top_p_keeps_no_token_beyond_its_exact_mass() -> None:
    result = batch((1.0, 0, 0.5), (1.0, 0, 0.25), (1.0, 0, 0.75)).probabilities(torch.zeros(3, 4))
    half, quarter = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert torch.equal(result[:2], torch.stack([half, quarter]))
    assert (result[2] > 0).tolist() == [True, True, True, False]


def test_top_p_of_zero_keeps_the_most_probable_token() -> None:
    result = batch((1.0, 0, 0.0)).probabilities(torch.tensor([[0.0, 2.0, 1.0]]))
    assert result.tolist() == [[0.0, 1.0, 0.0]]


def test_for_trees_removes_limits_of_greedy_sequences() -> None:
    result = batch((0.0, 3, 0.5, 0.4), (0.7, 5, 0.9, 0.1)).for_trees()
    assert result.temperature.tolist() == pytest.approx([1.0, 0.7])
    assert result.top_k.tolist() == [0, 5]
    assert result.top_p.tolist() == pytest.approx([1.0, 0.9])
    assert result.min_p.tolist() == pytest.approx([0.0, 0.1])
    drawn = batch((0.7, 5, 0.9, 0.1))
    assert drawn.for_trees() is drawn


def test_top_p_beyond_the_head_equals_a_full_sort() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2)) * 0.1
    result = batch((1.0, 0, 0.9), (1.0, 0, 0.05)).probabilities(logits)
    assert torch.allclose(result[0], reference(logits[0], 1.0, 0, 0.9), atol=1e-6)
    assert int((result[0] > 0).sum()) > 1024
    assert torch.allclose(result[1], reference(logits[1], 1.0, 0, 0.05), atol=1e-6)


def test_temperature_zero_is_one_hot() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(batch((0.0, 3, 0.5), (0.0, 0, 1.0)).probabilities(logits), expected)
    mixed = batch((0.0, 3, 0.5), (1.0, 0, 1.0)).probabilities(logits)
    assert torch.equal(mixed, torch.stack([expected[0], torch.full((4,), 0.25)]))


def test_min_p_applies_after_temperature_before_top_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    result = batch((1.0, 0, 0.8, 0.5), (2.0, 0, 1.0, 0.5)).probabilities(logits.repeat(2, 1))
    # Min-p keeps 1/2 and 1/4, which become 2/3 and 1/3: top-p 0.8 needs both, unlike without min-p.
    assert torch.allclose(result[0], torch.tensor([2 / 3, 1 / 3, 0.0, 0.0]))
    # At temperature 2 the ratios to the first are 1, 0.71, 0.55 and 0.45.
    assert (result[1] > 0).tolist() == [True, True, True, False]
    assert (batch((1.0, 0, 1.0, 1.0)).probabilities(logits)[0] > 0).sum() == 1


def test_rows_use_the_settings_of_their_sequence() -> None:
    settings = batch((0.0, 0, 1.0), (1.0, 2, 1.0))
    logits = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    result = settings.probabilities(logits, torch.tensor([1, 0, 1]))
    assert [int((row > 0).sum()) for row in result] == [2, 1, 2]


def test_float64_logits_give_float64_probabilities() -> None:
    assert batch((1.0, 0, 1.0)).probabilities(torch.randn(1, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("vocabulary", [5, 1024, 1025, 49_152, 50_000])
def test_token_of_weight_zero_is_never_drawn(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(64, vocabulary, generator=generator) ** 8
    weights *= torch.rand(64, vocabulary, generator=generator) < 0.3
    weights[:, vocabulary // 2] += 1e-30
    weights[:8] = 0.0
    weights[:8, torch.randint(vocabulary, (8,), generator=generator)] = 1e-40  # subnormal
    tiny, most = 2.0**-53, 1 - 2.0**-53
    for u in (tiny, 0.25, 0.5, 0.999, most):
        ids = draw(weights, torch.full((64,), u, dtype=torch.float64))
        assert (weights[torch.arange(64), ids] > 0).all()


@pytest.mark.parametrize("vocabulary", [40, 2000])
def test_draws_follow_the_weights(vocabulary: int) -> None:
    weights = torch.rand(vocabulary, generator=torch.Generator().manual_seed(4)).add(0.05) * 3
    count = 40_000
    noise = Noise(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    seen = noise.pick(weights.expand(count, -1), Purpose.BONUS, 0).bincount(minlength=vocabulary).double()
    expected = (weights / weights.sum() * count).double()
    statistic = float(2 * torch.xlogy(seen, seen / expected).sum())
    print(f"G = {statistic:.1f} with {vocabulary - 1} degrees of freedom")
    assert float(chi2.sf(statistic, vocabulary - 1)) > 1e-4


def test_draw_at_a_border_skips_tokens_of_weight_zero() -> None:
    assert draw(torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]]), torch.tensor([0.5], dtype=torch.float64)).tolist() == [3]


def test_draw_inverts_the_distribution_function() -> None:
    weights = torch.rand(1, 50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    total = weights[0].cumsum(-1)
    for u in torch.linspace(0.001, 0.999, 57, dtype=torch.float64):
        token = int(draw(weights, u[None]))
        assert total[token] >= u * total[-1] * (1 - 1e-12)
        assert token == 0 or total[token - 1] <= u * total[-1] * (1 + 1e-12)
