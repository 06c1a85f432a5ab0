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
from osd.learning.objective import DistillationObjective, sampled, weigh
from osd.runtime.top import most_probable
from tests.unit.learning.toys import HIDDEN, VOCABULARY, make_trace


def request():
    return Request(id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=16)


@pytest.fixture
def recorded():
    """Trace of two decoding steps: a rejection at the second draft token, and full acceptance."""
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    builder = TraceBuilder(request(), "toy", 64)
    builder.feed(torch.zeros(3, 4))
    draft = most_probable(torch.zeros(3, VOCABULARY), range(3), 4)
    target = most_probable(logits, range(2), VOCABULARY)
    builder.add([5, 9], target, draft, [(5, "toy"), (6, "toy"), (7, "toy")], accepted=1)
    builder.feed(torch.zeros(2, 4))
    builder.add(
        [4, 8, 2], most_probable(logits, range(2, 5), VOCABULARY),
        most_probable(torch.zeros(2, VOCABULARY), range(2), 4), [(4, "toy"), (8, "toy")], accepted=2,
    )  # fmt: skip
    builder.feed(torch.zeros(3, 4))
    trace = builder.build("general", "general", 1)
    return trace, logits


def test_rejected_position_has_the_rejecting_distribution(recorded):
    trace, logits = recorded
    batch = collate([trace])
    weights = weigh(batch, TrainerSettings(positions="rejected"))
    assert weights.tolist() == [0, 1, 0, 0, 0], "the last token is a bonus token"
    (row,) = weights.nonzero().flatten().tolist()
    # Token 6 was rejected here and replaced by 9; both were judged by this distribution.
    assert batch.token_ids[0, batch.place[row]] == 9
    distribution = torch.zeros(VOCABULARY).scatter(0, batch.target_ids[row], batch.target_logp[row].exp())
    assert np.allclose(distribution, logits[1].softmax(-1), atol=2e-3)


def test_position_weights_follow_the_setting(recorded):
    batch = collate([recorded[0]])
    assert weigh(batch, TrainerSettings()).tolist() == [1, 1, 1, 1, 1]
    settings = TrainerSettings(positions="weighted", rejected_weight=3.0)
    assert weigh(batch, settings).tolist() == [1, 3, 1, 1, 1]


@pytest.mark.parametrize(("override", "needed"), [
    ("trainer.jensen_shannon_beta=0.3", "trainer.divergence=jensen_shannon"),
    ("trainer.rejected_weight=2", "trainer.positions=weighted"),
])  # fmt: skip
def test_unused_setting_is_refused_by_name(override, needed):
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]} .*counts only with {needed}"):
        load_settings(None, [override], {})
    load_settings(None, [needed, override], {})


WIDE = 400


class Wide(VocabularyDrafter):
    """Drafter with a layer under a frozen head of 400 ids; the target names few of them."""

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


def gradient(drafter, negatives, step=0):
    settings = TrainerSettings(negatives=negatives, precision="float32")
    drafter.zero_grad()
    loss = drafter.loss(collate([make_trace(completion=20, top_k=6)]), DistillationObjective.of(settings, step))
    loss.value.backward()
    return float(loss.value.detach()), drafter.layer.weight.grad.clone()


def test_sample_has_all_named_ids_and_some_others():
    named = torch.tensor([7, 3, -1, 7, 90])
    sample = sampled(named, WIDE, 32, step=5)
    assert sample.places[:3].tolist() == [3, 7, 90]
    negatives = sample.places[3:].tolist()
    assert len(set(negatives)) == 32
    assert not {3, 7, 90} & set(negatives)
    assert sample.raised.tolist() == pytest.approx([0.0] * 3 + [math.log((WIDE - 3) / 32)] * 32)
    again, following = sampled(named, WIDE, 32, step=5), sampled(named, WIDE, 32, step=6)
    assert again is not None and following is not None  # noqa: PT018
    assert torch.equal(again.places, sample.places)
    assert not torch.equal(following.places, sample.places)


@pytest.mark.parametrize(("negatives", "vocabulary"), [(0, WIDE), (32, 60)])
def test_sample_of_most_ids_is_the_whole_vocabulary(negatives, vocabulary):
    assert sampled(torch.arange(5), vocabulary, negatives, step=0) is None


def test_sample_is_exact_when_other_ids_are_equal():
    torch.manual_seed(0)
    drafter = Wide(torch.cat([torch.randn(VOCABULARY, HIDDEN), torch.randn(1, HIDDEN).expand(WIDE - VOCABULARY, -1)]))
    (whole, exact), (part, approximate) = gradient(drafter, 0), gradient(drafter, 16)
    assert part == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(approximate, exact, rtol=1e-4, atol=1e-6)


def test_sampled_sum_of_exponentials_is_unbiased():
    torch.manual_seed(0)
    logits = torch.randn(WIDE)
    sums = []
    for step in range(2000):
        sample = sampled(torch.arange(VOCABULARY), WIDE, 32, step)
        sums.append((logits[sample.places] + sample.raised).exp().sum())
    mean, error = torch.stack(sums).mean(), torch.stack(sums).std() / math.sqrt(len(sums))
    assert abs(mean - logits.exp().sum()) < 4 * error
