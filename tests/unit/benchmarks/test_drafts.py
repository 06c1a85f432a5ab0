from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.engine.drafts import TracePositions, compare, positions_of
from benchmarks.engines import BenchError
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.verification.tree import Draw
from tests.traces import small_trace


def rows(*values: list[float]) -> Array:
    return Array.of(np.log(np.array(values, np.float32)).astype(np.float16))


def trace(verdict: list[int]):
    return small_trace(
        target_ids=Array.of(np.array([[1, 2, 3]] * 3, np.int32)),
        target_logp=rows(*[[0.5, 0.3, 0.1]] * 3),
        draft_ids=Array.of(np.array([[-1, -1], [3, 1], [8, 9]], np.int32)),
        draft_logp=rows([1, 1], [0.6, 0.2], [0.6, 0.2]),
        verdict=Array.of(np.array(verdict, np.int8)),
    )


def test_positions_keep_common_tokens_and_sum_the_rest():
    positions = positions_of([trace([NOT_DRAFTED, ACCEPTED, REJECTED])], 10)
    expected = torch.tensor([[0.5, 0, 0.1, 0.4], [0, 0, 0, 1.0]], dtype=torch.float64)
    assert torch.allclose(positions.p, expected, atol=1e-3)
    assert torch.allclose(positions.q, torch.tensor([[0.2, 0, 0.6, 0.2], [0, 0, 0, 1.0]]).double(), atol=1e-3)
    assert positions.accepted == 0.5
    assert positions.listed == pytest.approx(0.3, abs=1e-3)


def test_positions_skip_drafts_without_distribution():
    known = trace([NOT_DRAFTED, REJECTED, ACCEPTED])
    ids = known.draft_ids.numpy().copy()
    ids[2] = -1
    positions = positions_of([msgspec.structs.replace(known, draft_ids=Array.of(ids))], 10)
    assert len(positions.p) == 1
    assert positions.accepted == 0.0


def test_positions_of_traces_without_drafts_are_refused():
    with pytest.raises(BenchError, match="no drafted token"):
        positions_of([trace([NOT_DRAFTED] * 3)], 10)


def test_measured_shares_agree_with_formulas_and_bound():
    table = compare(positions_of([trace([NOT_DRAFTED, ACCEPTED, ACCEPTED])] * 128, 256), drafts=2, repeats=16)
    assert not table.broken
    assert {row.draw for row in table.rows} == {*(draw.value for draw in Draw), "chain"}
    for row in table.rows:
        print(f"{row.draw} {row.rule}: {row.first.value:.4f}, formula {row.exact}, bound {row.bound:.4f}")
        if row.exact is not None:
            assert row.first.value == pytest.approx(row.exact, abs=0.03)
        assert row.gap > -0.03


def test_noise_above_the_bound_is_within_the_error():
    generator = torch.Generator().manual_seed(9)
    p, q = torch.softmax(3 * torch.randn(2, 12, 6, dtype=torch.float64, generator=generator), -1)
    table = compare(TracePositions(p, q, 1.0, 0.5, 1), drafts=2, repeats=2)
    assert any(row.exact is None and row.first.value > row.bound + 1e-3 for row in table.rows)
    assert not table.broken
