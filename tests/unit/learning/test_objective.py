from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from osd.config import ConfigError, TrainerSettings, load_settings
from osd.drafting.base import Needs
from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.engine.request import Request, SamplingParams
from osd.engine.trace_builder import TraceBuilder
from osd.learning.batch import collate
from osd.learning.objective import Objective, sampled, weigh
from osd.runtime.top import most_probable
from tests.unit.learning.toys import HIDDEN, VOCABULARY, make_trace


def request():
    return Request(id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=16)


@pytest.fixture
def recorded():
    """What the engine records of two rounds: one that erred at its second draft token, one accepted whole."""
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    builder = TraceBuilder(request(), "toy", 64)
    builder.feed(torch.zeros(3, 4))
    draft = most_probable(torch.zeros(3, VOCABULARY), range(3), 4)
    target = most_probable(logits, range(2), VOCABULARY)
    builder.add([5, 9], target, draft, [(5, "toy"), (6, "toy"), (7, "toy")], accepted=1)
    builder.feed(torch.zeros(2, 4))
    builder.add(
        [4, 8, 2],
        most_probable(logits, range(2, 5), VOCABULARY),
        most_probable(torch.zeros(2, VOCABULARY), range(2), 4),
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


WIDE = 400


class Wide(VocabularyDrafter):
    """Drafts some of 400 ids, most of which no target ever names, by a layer under a frozen head."""

    kind = "wide"
    needs = Needs(taps=(0,))

    def __init__(self, rows):
        super().__init__(len(rows), WIDE)
        self.layer, self.rows = nn.Linear(HIDDEN, HIDDEN), rows
        self.set_vocabulary(torch.arange(len(rows)))

    @property
    def head_rows(self):
        return self.rows

    def before_head(self, batch, depth, drafted=None):
        places = ((batch.place - 2 - d).clamp(min=0) for d in range(depth))
        return [self.layer(batch.hidden[batch.sequence, place]) for place in places]

    def session(self, runtime):
        raise NotImplementedError


def wide(spread, vocabulary=WIDE):
    torch.manual_seed(0)
    named = torch.randn(VOCABULARY, HIDDEN)
    others = torch.randn(1, HIDDEN) + spread * torch.randn(vocabulary - VOCABULARY, HIDDEN)
    return Wide(torch.cat([named, others]))


def gradient(drafter, negatives, step=0):
    settings = TrainerSettings(negatives=negatives, precision="float32")
    drafter.zero_grad()
    loss = drafter.loss(collate([make_trace(completion=20, top_k=6)]), Objective.of(settings, step))
    loss.value.backward()
    return float(loss.value.detach()), drafter.layer.weight.grad.clone()


def test_what_was_named_is_all_there_and_the_rest_is_a_sample_of_the_others():
    named = torch.tensor([7, 3, -1, 7, 90])
    found = sampled(named, WIDE, 32, step=5)
    assert found.places[:3].tolist() == [3, 7, 90]
    others = found.places[3:].tolist()
    assert len(set(others)) == 32
    assert not {3, 7, 90} & set(others)
    assert found.raised.tolist() == pytest.approx([0.0] * 3 + [math.log((WIDE - 3) / 32)] * 32)
    again, next_one = sampled(named, WIDE, 32, step=5), sampled(named, WIDE, 32, step=6)
    assert again is not None and next_one is not None  # noqa: PT018
    assert torch.equal(again.places, found.places)
    assert not torch.equal(next_one.places, found.places)


@pytest.mark.parametrize(("negatives", "vocabulary"), [(0, WIDE), (32, 60)])
def test_where_the_sample_would_be_almost_all_of_the_vocabulary_it_is_all(negatives, vocabulary):
    assert sampled(torch.arange(5), vocabulary, negatives, step=0) is None


def test_where_all_that_is_not_named_is_alike_a_sample_says_exactly_what_all_of_it_says():
    drafter = wide(spread=0.0)
    (whole, exact), (part, mine) = gradient(drafter, 0), gradient(drafter, 16)
    assert part == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)


def test_the_sum_of_exponentials_of_a_sample_is_that_of_all_on_average():
    torch.manual_seed(0)
    logits = torch.randn(WIDE)
    sums = []
    for step in range(2000):
        found = sampled(torch.arange(VOCABULARY), WIDE, 32, step)
        sums.append((logits[found.places] + found.raised).exp().sum())
    mean, error = torch.stack(sums).mean(), torch.stack(sums).std() / math.sqrt(len(sums))
    assert abs(mean - logits.exp().sum()) < 4 * error


def test_a_small_vocabulary_is_read_whole():
    drafter = wide(spread=1.0, vocabulary=VOCABULARY + 8)
    assert gradient(drafter, 512)[0] == gradient(drafter, 0)[0]
