"""Data parallelism of two processes: rank 0 is this process; rank 1 stores the weights of each micro-batch."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from osd.capture.trace import ACCEPTED, REJECTED, Array
from osd.config import TrainerSettings
from osd.drafting.acceptance_head import has_head
from osd.learning.batch import collate
from osd.learning.distiller import Distiller
from osd.learning.replay import ReplaySample
from tests.priority import keep_priority
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from tests.waiting import HANG_SECONDS
from trainer.ranks import Rank, RankZero

POSITIONS = 30
SETTINGS = TrainerSettings(learning_rate=0.03, update_tokens=4 * POSITIONS, precision="float32")


class Poisoned(Toy):
    """Drafter with a finite loss whose third micro-batch has a gradient of NaN."""

    kind = "poisoned"
    batches = 0

    def unroll(self, batch, depth, *arguments):
        self.batches += 1
        first, *rest = super().unroll(batch, depth, *arguments)
        if self.batches == 3:
            first.register_hook(lambda gradient: gradient * torch.nan)
        return [first, *rest]


def make(config):
    drafter = Poisoned() if config["kind"] == "poisoned" else Toy()
    return drafter.add_head() if has_head(config) else drafter


class Idle:
    """Loads of replicas without requests."""

    def read(self, glance=False):
        return {}


class RecordingRank(Rank):
    """Rank that stores the weights it computes each micro-batch with."""

    folder = Path()

    def compute(self, distiller, message):
        weights = {name: value.contiguous() for name, value in distiller.drafter.weights().items()}
        save_file(weights, self.folder / f"{message.domain}-{message.number}.safetensors")
        return super().compute(distiller, message)


def join(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=HANG_SECONDS)
    )


def run_rank_one(folder):
    keep_priority()
    torch.set_num_threads(1)
    join(1, folder)
    RecordingRank.folder = folder
    RecordingRank(SETTINGS, make, Idle()).run()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def rank_zero(folder):
    process = multiprocessing.get_context("spawn").Process(target=run_rank_one, args=(folder,), daemon=True)
    process.start()
    join(0, folder)
    rank_zero = RankZero()
    yield rank_zero
    rank_zero.end()
    process.join(HANG_SECONDS)  # slow on a busy machine
    dist.destroy_process_group()
    assert process.exitcode == 0


def traces(step, **changes):
    return [make_trace(f"r{step}-{n}", completion=POSITIONS, seed=2 * step + n, top_k=6, **changes) for n in range(2)]


def drafter(kind=Toy):
    torch.manual_seed(0)
    return kind()


def step_both(rank_zero, distiller, halves):
    return rank_zero.step(distiller, [ReplaySample([trace], []) for trace in halves])


def has_weights(folder, domain, number, weights):
    stored = load_file(folder / f"{domain}-{number}.safetensors")
    return stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in stored)


def copy(weights):
    return {name: value.clone() for name, value in weights.items()}


def test_two_ranks_train_like_one_process_on_whole_batches(rank_zero, folder):
    single, shared = Distiller(drafter(), SETTINGS), rank_zero.distiller("halves", drafter(), SETTINGS)
    first = copy(shared.drafter.weights())
    for step in range(9):
        before = copy(shared.drafter.weights())
        together = step_both(rank_zero, shared, traces(step))
        whole = single.step(collate(traces(step)))
        assert together.loss == pytest.approx(whole.loss, rel=1e-5)
        assert has_weights(folder, "halves", step, before)
    assert shared.steps == single.steps == 9
    assert not shared.skipped
    # Four updates; the gradients of the ninth micro-step wait, on both ranks, for the next update.
    for name, weight in shared.drafter.weights().items():
        assert not torch.equal(weight, first[name])
        torch.testing.assert_close(weight, single.drafter.weights()[name], rtol=1e-4, atol=1e-6)
    shared.update()
    single.update()
    for name, weight in shared.drafter.weights().items():
        torch.testing.assert_close(weight, single.drafter.weights()[name], rtol=1e-4, atol=1e-6)
    assert rank_zero.clock() - time.process_time() > 0.01  # CPU time of rank 1


def test_non_finite_gradient_on_one_rank_changes_no_weights(rank_zero, folder):
    poisoned = rank_zero.distiller("poisoned", drafter(Poisoned), SETTINGS)
    poisoned.drafter.batches = 100  # no NaN on rank 0
    for step in range(2):
        assert not step_both(rank_zero, poisoned, traces(step)).skipped
    before = copy(poisoned.drafter.weights())
    assert not step_both(rank_zero, poisoned, traces(2)).skipped
    assert step_both(rank_zero, poisoned, traces(3)).skipped  # the update includes the third gradient of rank 1
    assert poisoned.skipped == 1
    assert not step_both(rank_zero, poisoned, traces(4)).skipped
    assert has_weights(folder, "poisoned", 4, before)
    assert all(torch.equal(value, before[name]) for name, value in poisoned.drafter.weights().items())
    first, second = traces(5)
    non_finite = Array.of(np.full(second.hidden.shape, np.nan, np.float32))
    step = step_both(rank_zero, poisoned, [first, msgspec.structs.replace(second, hidden=non_finite)])
    assert np.isfinite(step.loss)
    assert poisoned.skipped == 2
    assert poisoned.counts[0] == 3 * POSITIONS  # the finite micro-batch counts
    step_both(rank_zero, poisoned, traces(6))
    assert not any(torch.equal(value, before[name]) for name, value in poisoned.drafter.weights().items())
    step_both(rank_zero, poisoned, traces(7))
    assert has_weights(folder, "poisoned", 7, copy(poisoned.drafter.weights()))


def test_vocabulary_checkpoint_and_head_reach_every_rank(rank_zero, folder):
    class ShiftingVocabulary(Toy):
        def adapt_vocabulary(self, counts):
            with torch.no_grad():
                self.table.weight.add_(1.0)

    def drafted(step):
        verdict = np.array([ACCEPTED, REJECTED] * (POSITIONS // 2), np.int8)
        return [
            msgspec.structs.replace(trace, drafted=trace.completion_ids, verdict=Array.of(verdict))
            for trace in traces(step)
        ]

    with_head = drafter(ShiftingVocabulary).add_head()
    shared = rank_zero.distiller("head", with_head, SETTINGS)
    head = copy(with_head.acceptance.state_dict())
    for step in range(6):
        if step == 3:  # between two updates
            shared.adapt_vocabulary(torch.zeros(VOCABULARY))
        before = copy(with_head.weights())
        step_both(rank_zero, shared, drafted(step))
        assert has_weights(folder, "head", step, before)
    assert shared.head_loss is not None
    assert any(not torch.equal(value, head[name]) for name, value in with_head.acceptance.state_dict().items())
    tensors, counters = shared.state_dict()
    follower = drafter(ShiftingVocabulary).add_head()
    resumed = rank_zero.distiller("resumed", follower, SETTINGS)
    resumed.load_state_dict(copy(tensors), counters)
    step_both(rank_zero, resumed, drafted(6))
    assert has_weights(folder, "resumed", 6, copy(with_head.weights()))
