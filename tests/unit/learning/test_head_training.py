"""Training of an acceptance head on the verdicts of verification."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.config import TrainerSettings
from osd.drafting.base import DrafterError
from osd.learning.batch import collate
from osd.learning.distiller import Distiller, DistillerError
from osd.learning.head_training import HeadTraining, drafted_depths
from tests.unit.learning.toys import HIDDEN, VOCABULARY, Toy, make_trace


def settings(**changes):
    return TrainerSettings(**{"learning_rate": 0.01, "update_tokens": 32, **changes})


def drafted(seed, completion=40):
    """Return a trace that rejects drafted tokens below 4 and accepts others; every fourth was not drafted."""
    trace = make_trace(f"t{seed}", completion=completion, seed=seed)
    tokens = trace.completion_ids.numpy()
    rejected = (tokens * 7 + seed) % 3 == 0  # independent of the target's distribution
    none = np.arange(completion) % 4 == 3
    tokens = np.where(none, -1, np.where(rejected, (tokens + seed) % 4, np.where(tokens < 4, tokens + 4, tokens)))
    verdict = np.where(none, NOT_DRAFTED, np.where(rejected, REJECTED, ACCEPTED)).astype(np.int8)
    return msgspec.structs.replace(trace, drafted=Array.of(tokens.astype(np.int32)), verdict=Array.of(verdict))


def with_head():
    torch.manual_seed(0)
    return Toy().add_head()


def test_head_learns_which_tokens_are_accepted():
    distiller = Distiller(with_head(), settings())
    for n in range(120):
        distiller.step(collate([drafted(n)]))
    states = torch.eye(VOCABULARY, HIDDEN)
    probability = distiller.drafter.acceptance(states).sigmoid()
    print(probability)
    assert probability[:4].max() < 0.3
    assert probability[4:].min() > 0.7


def test_head_does_not_change_drafter_training():
    torch.manual_seed(0)
    plain = Distiller(Toy(), settings())
    both = Distiller(with_head(), settings())
    for n in range(20):
        assert plain.step(collate([drafted(n)])).loss == both.step(collate([drafted(n)])).loss
    assert both.head_loss is not None
    for name, weight in plain.drafter.weights().items():
        assert torch.equal(both.drafter.weights()[name], weight)


def test_rejection_has_six_times_the_weight():
    drafter = with_head()
    training, batch = HeadTraining(drafter, settings()), collate([drafted(1)])
    with torch.no_grad():
        drafter.acceptance.odds.bias.fill_(1.0)
    _, accepted = training.odds(batch, 0)
    kept, lost = int(accepted.sum()), int((~accepted).sum())
    goal = 6 * lost * np.log1p(np.exp(1.0)) + kept * np.log1p(np.exp(-1.0))
    assert training.gather(batch, 0) == pytest.approx(goal / (6 * lost + kept), rel=1e-5)


def test_token_mixing_replaces_a_share_without_labels():
    fed = []

    class Recording(Toy):
        def drafted_states(self, batch, tokens, depth):
            fed.append(tokens)
            return super().drafted_states(batch, tokens, depth)

    training = HeadTraining(Recording().add_head(), settings())
    labels, true = 0, []
    for n in range(60):
        batch = collate([drafted(n, completion=80)])
        tested = batch.verdict != NOT_DRAFTED
        _, accepted = training.odds(batch, n)
        labels += len(accepted)
        target = batch.token_ids[batch.sequence, batch.place][tested]
        true.append((fed[-1] == target)[batch.drafted[tested] != target])
        changed = (fed[-1] != batch.drafted[tested]).sum()
        assert len(accepted) == tested.sum() - changed
    share = torch.cat(true).float().mean()
    print(f"{share:.3f} of {len(torch.cat(true))}")
    assert 0.1 < share < 0.2


def test_token_mixing_depends_only_on_the_step():
    training, batch = HeadTraining(with_head(), settings()), collate([drafted(3, completion=80)])
    assert torch.equal(training.odds(batch, 5)[1], training.odds(batch, 5)[1])
    assert len({len(training.odds(batch, n)[1]) for n in range(8)}) > 1


def test_drafted_depths_restart_with_each_draft():
    a, r, n = ACCEPTED, REJECTED, NOT_DRAFTED
    verdicts = ([a, a, n, a, r], [a, r, a, a, a])
    traces = [
        msgspec.structs.replace(make_trace(str(i), completion=5), verdict=Array.of(np.array(verdict, np.int8)))
        for i, verdict in enumerate(verdicts)
    ]
    assert drafted_depths(collate(traces)).tolist() == [1, 2, 3, 1, 2, 1, 2, 1, 2, 3]


def test_batch_without_drafts_gives_no_head_loss():
    distiller = Distiller(with_head(), settings())
    distiller.step(collate([make_trace("plain", completion=40)]))
    assert distiller.head_loss is None
    assert not any(weight.any() for weight in distiller.drafter.acceptance.parameters())


def test_head_loss_of_nan_changes_nothing():
    drafter = with_head()
    training = HeadTraining(drafter, settings(update_tokens=1))
    with torch.no_grad():
        drafter.acceptance.odds.bias.fill_(float("nan"))
        before = [weight.clone() for weight in drafter.acceptance.blocks.parameters()]
    training.gather(collate([drafted(0)]), 0)
    training.settle()
    training.update()
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.acceptance.blocks.parameters(), strict=True))


def test_drafter_without_a_head_is_refused():
    with pytest.raises(DrafterError, match="has no acceptance head to train"):
        HeadTraining(Toy(), settings())


def test_resumed_head_training_equals_uninterrupted():
    straight, half = (
        Distiller(with_head(), settings(update_tokens=16)),
        Distiller(with_head(), settings(update_tokens=16)),
    )
    for n in range(20):
        straight.step(collate([drafted(n)]))
    for n in range(10):
        half.step(collate([drafted(n)]))
    tensors, counters = half.state_dict()
    resumed = Distiller(with_head(), settings(update_tokens=16))
    resumed.load_state_dict({name: value.clone() for name, value in tensors.items()}, counters)
    for n in range(10, 20):
        resumed.step(collate([drafted(n)]))
    for name, weight in straight.drafter.weights().items():
        assert torch.equal(resumed.drafter.weights()[name], weight), name


def test_state_without_a_head_loads_and_a_wrong_one_fails():
    before = Distiller(Toy(), settings())
    before.step(collate([drafted(0)]))
    tensors, counters = before.state_dict()
    distiller = Distiller(with_head(), settings())
    distiller.load_state_dict(tensors, counters)
    assert distiller.steps == 1
    with pytest.raises(DistillerError, match="acceptance_optimizer"):
        distiller.load_state_dict(tensors | {"acceptance_optimizer.exp_avg.other": torch.zeros(1)}, counters)
