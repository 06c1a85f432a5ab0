"""Three poisoned records in ten: published versions serve clean traffic as well as before, and recall stays bounded."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from osd.capture.trace import Array, Trace
from osd.config import RecallSettings, TrainerSettings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.rehearsal import rehearse
from osd.learning.batch import collate, length
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.learning.gate import Gate
from osd.learning.online import Learner, LocalExecutor, empty_replay
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace, target_logits

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "3 of 10 requests are poison: random text, absurd distributions, or one text repeated",
        "no published version accepts less of clean traffic; recall keeps its size and its speed",
    ),
]

COMPLETION, CLEAN, STREAM = 30, 60, 120
TOLERANCE = 0.005
"""Fall of the acceptance rate that the gate treats as noise."""

Poison = Callable[[int], Trace]


def random_text(number: int) -> Trace:
    """Return tokens that the target would not generate, with its true distributions."""
    rng = np.random.default_rng(number)
    log_p = torch.tensor(target_logits()).log_softmax(1).numpy()
    tokens = rng.integers(VOCABULARY, size=COMPLETION + 4)
    rows = log_p[tokens[3:-1]]
    ids = np.argsort(-rows, axis=1).astype(np.int32)
    return msgspec.structs.replace(
        make_trace(f"random-{number}", completion=COMPLETION, seed=number),
        prompt_ids=Array.of(tokens[:4].astype(np.int32)),
        completion_ids=Array.of(tokens[4:].astype(np.int32)),
        target_ids=Array.of(ids),
        target_logp=Array.of(np.take_along_axis(rows, ids, 1).astype(np.float16)),
    )


def absurd_distributions(number: int) -> Trace:
    """Return distributions of a target that prefers the least probable tokens of the real one."""
    return make_trace(f"absurd-{number}", completion=COMPLETION, seed=number, logits=-5 * target_logits())


def one_text(number: int) -> Trace:
    """Return the same request under a new name."""
    return make_trace(f"same-{number}", completion=COMPLETION, seed=12345)


POISONS = [random_text, absurd_distributions, one_text]


def clean(number: int) -> Trace:
    """Return a clean record."""
    return make_trace(f"clean-{number}", completion=COMPLETION, seed=number)


def traffic(poison: Poison) -> Iterator[Trace]:
    """Yield traffic with three poisoned records in ten."""
    for number in range(STREAM):
        yield poison(10_000 + number) if number % 10 in (1, 4, 8) else clean(1000 + number)


def acceptance(drafter: Toy) -> float:
    """Return the acceptance rate on clean requests outside of the training data."""
    figures = evaluate(drafter, [collate([clean(5000 + number)]) for number in range(40)], 2, "forward_kl")
    return float(figures.overlaps.mean())


class Loop:
    """Learner of a stream, with the clean acceptance rate of each version that passes its gate."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        settings = TrainerSettings(
            learning_rate=0.03, update_tokens=1, min_records=4, held_out=0.3, steps_per_candidate=20
        )
        gate, replay = Gate(2, settings.divergence, 60), empty_replay(settings, min_held_out=0)
        self._learner = Learner(Distiller(Toy(), settings), settings, gate, VOCABULARY, replay)
        self._served = Toy()
        self._served.load_weights(self._learner.distiller.drafter.weights())
        self.history = [acceptance(self._served)]

    def follow(self, traces: Iterator[Trace]) -> None:
        """Train on traces and evaluate candidates."""
        learner = self._learner
        for trace in traces:
            learner.add(trace)
            if not learner.ready:
                continue
            for _ in range(4):
                learner.step(64, LocalExecutor())
            if learner.due and learner.propose(self._served).passed:
                self._served.load_weights(copy.deepcopy(learner.candidate().weights()))
                self.history.append(acceptance(self._served))

    @property
    def largest_fall(self) -> float:
        """Largest fall of the acceptance rate from one version to the next."""
        return max(earlier - later for earlier, later in itertools.pairwise(self.history))


@pytest.mark.parametrize(
    ("poison", "before"), [(random_text, 0), (one_text, 0), *((poison, CLEAN) for poison in POISONS)]
)
def test_no_version_is_worse_on_clean_traffic(poison, before, fault_result):
    loop = Loop()
    loop.follow(clean(number) for number in range(before))
    first = loop.history[-1]
    loop.follow(traffic(poison))
    print(f"clean acceptance of each version: {[round(value, 4) for value in loop.history]}")
    assert loop.largest_fall <= TOLERANCE
    assert loop.history[-1] >= first - TOLERANCE
    assert loop.history[-1] > 0.9
    fault_result.lost = f"clean acceptance {first:.3f} before, {loop.history[-1]:.3f} after"


@pytest.mark.fault(
    "3 of 10 records are false about the target, and a drafter starts with them",
    "it learns mostly true records; no version accepts much less of clean traffic than the version before",
)
def test_drafter_learns_mostly_true_distributions(fault_result):
    """Requests cannot produce such records; without better data, three in ten have a proportional influence."""
    loop = Loop()
    loop.follow(traffic(absurd_distributions))
    print(f"clean acceptance of each version: {[round(value, 4) for value in loop.history]}")
    assert loop.history[-1] > 0.7 > loop.history[0] + 0.2
    assert loop.largest_fall < 0.05
    fault_result.lost = f"clean acceptance {loop.history[0]:.3f} before, {loop.history[-1]:.3f} after"


@pytest.mark.parametrize("poison", POISONS)
def test_recall_keeps_its_size_and_speed(poison, fault_result):
    memories = Memories(RecallSettings(megabytes=1))
    memory = memories.of("")

    def learn(traces: list[Trace]) -> float:
        began = time.perf_counter()
        for trace in traces:
            for _ in rehearse(memory, memories.backend.text(length(trace)), trace):
                pass
        return (time.perf_counter() - began) / len(traces)

    size = memory.contents().entries.numel()
    before = min(learn([clean(number) for number in range(50)]) for _ in range(3))
    flood = min(learn([poison(number) for number in range(start, start + 300)]) for start in (0, 300, 600))
    after = min(learn([clean(number) for number in range(50)]) for _ in range(3))
    print(f"seconds per record: {before:.6f}, poisoned {flood:.6f}, afterwards {after:.6f}")
    assert memory.contents().entries.numel() == size
    assert memory.used() <= memory.entries
    assert flood < 3 * before + 1e-3
    assert after < 3 * before + 1e-3
    fault_result.lost = "nothing"
