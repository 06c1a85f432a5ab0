"""The acceptance head learns what verification decided, and the drafter that carries it learns nothing from it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, TraceError
from osd.config import TrainerSettings
from osd.drafting.base import DrafterError
from osd.learning.batch import check, collate
from osd.learning.distiller import Distiller, DistillerError
from osd.learning.head_training import HeadTraining, drafted_depths
from tests.unit.learning.toys import HIDDEN, VOCABULARY, Toy, make_trace


def settings(**changes):
    return TrainerSettings(**{"learning_rate": 0.01, "update_tokens": 32, **changes})


def drafted(seed, completion=40):
    """A trace in which drafted tokens below 4 were rejected and all others accepted, but for every fourth place."""
    trace = make_trace(f"t{seed}", completion=completion, seed=seed)
    tokens = trace.completion_ids.numpy()
    rejected = (tokens * 7 + seed) % 3 == 0  # what the target said there has nothing to do with it
    none = np.arange(completion) % 4 == 3
    mine = np.where(none, -1, np.where(rejected, (tokens + seed) % 4, np.where(tokens < 4, tokens + 4, tokens)))
    verdict = np.where(none, NOT_DRAFTED, np.where(rejected, REJECTED, ACCEPTED)).astype(np.int8)
    return msgspec.structs.replace(trace, drafted=Array.of(mine.astype(np.int32)), verdict=Array.of(verdict))


def judging():
    torch.manual_seed(0)
    return Toy().add_head()


def test_a_head_learns_which_tokens_are_accepted():
    distiller = Distiller(judging(), settings())
    for n in range(120):
        distiller.step(collate([drafted(n)]))
    states = torch.eye(VOCABULARY, HIDDEN)
    said = distiller.drafter.acceptance(states).sigmoid()
    print(said)
    assert said[:4].max() < 0.3
    assert said[4:].min() > 0.7


def test_the_drafter_learns_as_if_it_had_no_head():
    torch.manual_seed(0)
    plain = Distiller(Toy(), settings())
    both = Distiller(judging(), settings())
    for n in range(20):
        assert plain.step(collate([drafted(n)])).loss == both.step(collate([drafted(n)])).loss
    assert both.head_loss is not None
    for name, weight in plain.drafter.weights().items():
        assert torch.equal(both.drafter.weights()[name], weight)


def test_a_rejection_weighs_six_times_as_much():
    drafter = judging()
    training, batch = HeadTraining(drafter, settings()), collate([drafted(1)])
    with torch.no_grad():
        drafter.acceptance.odds.bias.fill_(1.0)
    _, accepted = training.odds(batch, 0)
    kept, lost = int(accepted.sum()), int((~accepted).sum())
    goal = 6 * lost * np.log1p(np.exp(1.0)) + kept * np.log1p(np.exp(-1.0))
    assert training.gather(batch, 0) == pytest.approx(goal / (6 * lost + kept), rel=1e-5)


def test_a_share_of_rejected_tokens_gives_way_to_the_targets_own_and_has_no_label():
    fed = []

    class Noting(Toy):
        def drafted_states(self, batch, tokens, depth):
            fed.append(tokens)
            return super().drafted_states(batch, tokens, depth)

    training = HeadTraining(Noting().add_head(), settings())
    labels, true = 0, []
    for n in range(60):
        batch = collate([drafted(n, completion=80)])
        tested = batch.verdict != NOT_DRAFTED
        found = training.odds(batch, n)
        labels += len(found[1])
        own = batch.token_ids[batch.sequence, batch.place][tested]
        true.append((fed[-1] == own)[batch.drafted[tested] != own])
        changed = (fed[-1] != batch.drafted[tested]).sum()
        assert len(found[1]) == tested.sum() - changed
    share = torch.cat(true).float().mean()
    print(f"{share:.3f} of {len(torch.cat(true))}")
    assert 0.1 < share < 0.2


def test_the_same_step_mixes_the_same_tokens():
    training, batch = HeadTraining(judging(), settings()), collate([drafted(3, completion=80)])
    assert torch.equal(training.odds(batch, 5)[1], training.odds(batch, 5)[1])
    assert len({len(training.odds(batch, n)[1]) for n in range(8)}) > 1


def test_a_drafted_token_is_as_deep_as_the_round_had_gone():
    a, r, n = ACCEPTED, REJECTED, NOT_DRAFTED
    verdicts = ([a, a, n, a, r], [a, r, a, a, a])
    traces = [
        msgspec.structs.replace(make_trace(str(i), completion=5), verdict=Array.of(np.array(verdict, np.int8)))
        for i, verdict in enumerate(verdicts)
    ]
    assert drafted_depths(collate(traces)).tolist() == [1, 2, 3, 1, 2, 1, 2, 1, 2, 3]


def test_where_nothing_was_drafted_there_is_nothing_to_learn():
    distiller = Distiller(judging(), settings())
    distiller.step(collate([make_trace("plain", completion=40)]))
    assert distiller.head_loss is None
    assert not any(weight.any() for weight in distiller.drafter.acceptance.parameters())


def test_a_loss_that_is_not_finite_teaches_nothing():
    drafter = judging()
    training = HeadTraining(drafter, settings(update_tokens=1))
    with torch.no_grad():
        drafter.acceptance.odds.bias.fill_(float("nan"))
        before = [weight.clone() for weight in drafter.acceptance.blocks.parameters()]
    training.gather(collate([drafted(0)]), 0)
    training.settle()
    training.update()
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.acceptance.blocks.parameters(), strict=True))


def test_a_drafter_without_a_head_has_none_to_train():
    with pytest.raises(DrafterError, match="has no acceptance head to train"):
        HeadTraining(Toy(), settings())


def test_training_of_a_head_goes_on_from_a_saved_state_as_if_it_had_not_stopped():
    straight, half = Distiller(judging(), settings(update_tokens=16)), Distiller(judging(), settings(update_tokens=16))
    for n in range(20):
        straight.step(collate([drafted(n)]))
    for n in range(10):
        half.step(collate([drafted(n)]))
    tensors, counters = half.state_dict()
    resumed = Distiller(judging(), settings(update_tokens=16))
    resumed.load_state_dict({name: value.clone() for name, value in tensors.items()}, counters)
    for n in range(10, 20):
        resumed.step(collate([drafted(n)]))
    for name, weight in straight.drafter.weights().items():
        assert torch.equal(resumed.drafter.weights()[name], weight), name


def test_a_state_from_before_there_was_a_head_is_taken_and_a_foreign_one_refused():
    before = Distiller(Toy(), settings())
    before.step(collate([drafted(0)]))
    tensors, counters = before.state_dict()
    distiller = Distiller(judging(), settings())
    distiller.load_state_dict(tensors, counters)
    assert distiller.steps == 1
    with pytest.raises(DistillerError, match="acceptance_optimizer"):
        distiller.load_state_dict(tensors | {"acceptance_optimizer.exp_avg.other": torch.zeros(1)}, counters)


def test_a_drafted_id_outside_the_vocabulary_is_refused():
    trace = drafted(0)
    spoilt = trace.drafted.numpy().copy()
    spoilt[0] = VOCABULARY
    with pytest.raises(TraceError, match="drafted has an id outside"):
        check(msgspec.structs.replace(trace, drafted=Array.of(spoilt)), VOCABULARY, HIDDEN)
