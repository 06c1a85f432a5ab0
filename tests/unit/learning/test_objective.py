from __future__ import annotations

import numpy as np
import pytest
import torch

from osd.config import ConfigError, TrainerSettings, load_settings
from osd.engine.request import Request, SamplingParams
from osd.engine.trace_builder import TraceBuilder
from osd.learning.batch import collate
from osd.learning.objective import weigh
from osd.runtime.top import top

VOCABULARY = 12


def request():
    return Request(id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=16)


@pytest.fixture
def recorded():
    """What the engine records of two rounds: one that erred at its second draft token, one accepted whole."""
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    builder = TraceBuilder(request(), "toy", 64)
    builder.feed(torch.zeros(3, 4))
    draft = top(torch.zeros(3, VOCABULARY), range(3), 4)
    builder.add([5, 9], top(logits, range(2), VOCABULARY), draft, [(5, "toy"), (6, "toy"), (7, "toy")], accepted=1)
    builder.feed(torch.zeros(2, 4))
    builder.add(
        [4, 8, 2],
        top(logits, range(2, 5), VOCABULARY),
        top(torch.zeros(2, VOCABULARY), range(2), 4),
        [(4, "toy"), (8, "toy")],
        accepted=2,
    )
    builder.feed(torch.zeros(3, 4))
    trace = builder.build("general", "general", 1)
    assert trace is not None
    return trace, logits


def test_the_position_that_erred_is_the_one_whose_distribution_rejected_the_draft(recorded):
    trace, logits = recorded
    batch = collate([trace])
    weights = weigh(batch, TrainerSettings(positions="rejected"))
    assert weights.tolist() == [0, 1, 0, 0, 0]
    (row,) = weights.nonzero().flatten().tolist()
    # Token 6 was rejected here, 9 came in its stead; the distribution is the one over both, not the one after 9.
    assert batch.token_ids[0, batch.place[row]] == 9
    found = torch.zeros(VOCABULARY).scatter(0, batch.target_ids[row], batch.target_logp[row].exp())
    assert np.allclose(found, logits[1].softmax(-1), atol=2e-3)


def test_the_bonus_of_a_round_that_was_accepted_whole_is_no_rejection(recorded):
    batch = collate([recorded[0]])
    assert weigh(batch, TrainerSettings(positions="rejected"))[-1] == 0


def test_all_and_weighted_positions(recorded):
    batch = collate([recorded[0]])
    assert weigh(batch, TrainerSettings()).tolist() == [1, 1, 1, 1, 1]
    settings = TrainerSettings(positions="weighted", rejected_weight=3.0)
    assert weigh(batch, settings).tolist() == [1, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("trainer.jensen_shannon_beta=0.3", "trainer.divergence=jensen_shannon"),
        ("trainer.rejected_weight=2", "trainer.positions=weighted"),
    ],
)
def test_a_setting_that_would_not_be_used_is_refused_by_name(override, needed):
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]} .*counts only with {needed}"):
        load_settings(None, [override], {})
    load_settings(None, [needed, override], {})
