"""Two processes that train one drafter: rank 0 is this one, and the other says which weights it computes with."""

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
from osd.learning.replay import Sample
from tests.priority import keep_priority
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from tests.waiting import HANG_SECONDS
from trainer.ranks import Rank, RankZero

POSITIONS = 30
SETTINGS = TrainerSettings(learning_rate=0.03, update_tokens=4 * POSITIONS, precision="float32")


class Poisoned(Toy):
    """Its loss is finite, and the gradient of its third micro-batch is not."""

    kind = "poisoned"
    batches = 0

    def unroll(self, batch, depth, *more):
        self.batches += 1
        first, *others = super().unroll(batch, depth, *more)
        if self.batches == 3:
            first.register_hook(lambda gradient: gradient * torch.nan)
        return [first, *others]


def make(config):
    drafter = Poisoned() if config["kind"] == "poisoned" else Toy()
    return drafter.add_head() if has_head(config) else drafter


class Idle:
    """Replicas that have nothing to do."""

    def read(self, glance=False):
        return {}


class Telling(Rank):
    """Writes down with which weights it computes each micro-batch."""

    folder = Path()

    def compute(self, distiller, message):
        weights = {name: value.contiguous() for name, value in distiller.drafter.weights().items()}
        save_file(weights, self.folder / f"{message.domain}-{message.number}.safetensors")
        return super().compute(distiller, message)


def join(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=HANG_SECONDS)
    )


def help_out(folder):
    keep_priority()
    torch.set_num_threads(1)
    join(1, folder)
    Telling.folder = folder
    Telling(SETTINGS, make, Idle()).run()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def rank_zero(folder):
    process = multiprocessing.get_context("spawn").Process(target=help_out, args=(folder,), daemon=True)
    process.start()
    join(0, folder)
    rank_zero = RankZero()
    yield rank_zero
    rank_zero.end()
    process.join(HANG_SECONDS)  # beside other work it takes its time
    dist.destroy_process_group()
    assert process.exitcode == 0


def traces(step, **changes):
    return [make_trace(f"r{step}-{n}", completion=POSITIONS, seed=2 * step + n, top_k=6, **changes) for n in range(2)]


def drafter(kind=Toy):
    torch.manual_seed(0)
    return kind()


def share(rank_zero, distiller, halves):
    return rank_zero.step(distiller, [Sample([trace], []) for trace in halves])


def same_bits(folder, domain, number, weights):
    found = load_file(folder / f"{domain}-{number}.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)


def copy(weights):
    return {name: value.clone() for name, value in weights.items()}


def test_two_ranks_with_half_of_each_batch_learn_what_one_learns_from_all_of_it(rank_zero, folder):
    alone, shared = Distiller(drafter(), SETTINGS), rank_zero.distiller("halves", drafter(), SETTINGS)
    first = copy(shared.drafter.weights())
    for step in range(9):
        before = copy(shared.drafter.weights())
        together = share(rank_zero, shared, traces(step))
        whole = alone.step(collate(traces(step)))
        assert together.loss == pytest.approx(whole.loss, rel=1e-5)
        assert same_bits(folder, "halves", step, before)
    assert shared.steps == alone.steps == 9
    assert not shared.skipped
    # Four updates, and the ninth micro-step waits for the next; then it is applied, with what rank 1 has of it.
    for name, weight in shared.drafter.weights().items():
        assert not torch.equal(weight, first[name])
        torch.testing.assert_close(weight, alone.drafter.weights()[name], rtol=1e-4, atol=1e-6)
    shared.update()
    alone.update()
    for name, weight in shared.drafter.weights().items():
        torch.testing.assert_close(weight, alone.drafter.weights()[name], rtol=1e-4, atol=1e-6)
    assert rank_zero.clock() - time.process_time() > 0.01  # of rank 1


def test_what_is_not_finite_on_one_rank_changes_no_weight_on_any(rank_zero, folder):
    poisoned = rank_zero.distiller("poisoned", drafter(Poisoned), SETTINGS)
    poisoned.drafter.batches = 100  # never on rank 0
    for step in range(2):
        assert not share(rank_zero, poisoned, traces(step)).skipped
    before = copy(poisoned.drafter.weights())
    assert not share(rank_zero, poisoned, traces(2)).skipped
    assert share(rank_zero, poisoned, traces(3)).skipped  # its update has the other rank's third gradient
    assert poisoned.skipped == 1
    assert not share(rank_zero, poisoned, traces(4)).skipped
    assert same_bits(folder, "poisoned", 4, before)
    assert all(torch.equal(value, before[name]) for name, value in poisoned.drafter.weights().items())
    mine, theirs = traces(5)
    nowhere = Array.of(np.full(theirs.hidden.shape, np.nan, np.float32))
    step = share(rank_zero, poisoned, [mine, msgspec.structs.replace(theirs, hidden=nowhere)])
    assert np.isfinite(step.loss)
    assert poisoned.skipped == 2
    assert poisoned.counts[0] == 3 * POSITIONS  # the micro-batch that was finite counts
    share(rank_zero, poisoned, traces(6))
    assert not any(torch.equal(value, before[name]) for name, value in poisoned.drafter.weights().items())
    share(rank_zero, poisoned, traces(7))
    assert same_bits(folder, "poisoned", 7, copy(poisoned.drafter.weights()))


def test_another_vocabulary_a_checkpoint_and_the_acceptance_head_reach_every_rank(rank_zero, folder):
    class Words(Toy):
        def adapt_vocabulary(self, counts):
            with torch.no_grad():
                self.table.weight.add_(1.0)

    def drafted(step):
        verdict = np.array([ACCEPTED, REJECTED] * (POSITIONS // 2), np.int8)
        return [
            msgspec.structs.replace(trace, drafted=trace.completion_ids, verdict=Array.of(verdict))
            for trace in traces(step)
        ]

    judging = drafter(Words).add_head()
    shared = rank_zero.distiller("head", judging, SETTINGS)
    head = copy(judging.acceptance.state_dict())
    for step in range(6):
        if step == 3:  # between two updates
            shared.adapt_vocabulary(torch.zeros(VOCABULARY))
        before = copy(judging.weights())
        share(rank_zero, shared, drafted(step))
        assert same_bits(folder, "head", step, before)
    assert shared.head_loss is not None
    assert any(not torch.equal(value, head[name]) for name, value in judging.acceptance.state_dict().items())
    tensors, counters = shared.state_dict()
    follower = drafter(Words).add_head()
    resumed = rank_zero.distiller("resumed", follower, SETTINGS)
    resumed.load_state_dict(copy(tensors), counters)
    share(rank_zero, resumed, drafted(6))
    assert same_bits(folder, "resumed", 6, copy(judging.weights()))
