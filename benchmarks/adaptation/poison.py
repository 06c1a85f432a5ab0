"""Poisoned streams and corrupted candidates: what an attacker, or a bug, can do to a drafter that learns."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.learner import Online, Recipe, copied
from benchmarks.adaptation.offline_acceptance import Counts, total
from benchmarks.adaptation.recording import RecordingError
from osd.capture.trace import Trace
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.kangaroo.drafter import Kangaroo
from osd.drafters.trainable import Trainable
from osd.learning.gate import Gate
from osd.learning.online import empty_replay, held_out
from osd.traffic.prompt import Prompt

POISON = "poison"
"""The name of the recording, and the domain, of poisoned prompts."""

CLEAN, ANCHORED, BARE = "clean", "poisoned, with anchors", "poisoned, without anchors"

_WORDS = 24
_MAPPED = (Eagle, Kangaroo)  # rows of their heads do not follow the map by themselves


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Random text: half of it words of random letters, half of it any printable characters."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        letters = string.ascii_lowercase if number % 2 else string.printable[:94]
        words = ["".join(random.choice(list(letters), random.integers(2, 9))) for _ in range(_WORDS)]
        found.append(Prompt(f"{POISON}-{number}", POISON, (" ".join(words),)))
    return found


def mixed(clean: Sequence[Trace], poison: Sequence[Trace]) -> list[Trace]:
    """``clean`` in order, with ``poison`` spread evenly among it."""
    places = [((index + 0.5) / len(part), trace) for part in (clean, poison) for index, trace in enumerate(part)]
    return [trace for _, trace in sorted(places, key=lambda one: one[0])]


def beside(clean: int, share: float) -> int:
    """How many poisoned records are ``share`` of all beside so many clean ones."""
    return round(clean * share / (1 - share))


def traffic(clean: Sequence[Trace], poison: Sequence[Trace], share: float) -> list[Trace]:
    """``clean`` with as much of ``poison`` among it as makes ``share`` of all, or all of it."""
    return mixed(clean, poison[: beside(len(clean), share)])


@dataclass(frozen=True)
class Poisoned:
    """A way to learn: counts on clean records nobody trained on, and the weights in service in the end."""

    way: str
    clean: Counts
    weights: dict[str, Tensor]


def poison(
    experiment: Experiment,
    stream: Stream,
    poisoned: Sequence[Trace],
    kind: str,
    recipe: Recipe,
    report: Callable[[str], None] = lambda step: None,
) -> list[Poisoned]:
    """Learn a clean stream, the same with poison in it, and that without anchors."""
    drafter = experiment.fresh(kind)
    start = copied(drafter)
    offline = experiment.offline_acceptance(drafter, stream, Stream(POISON, list(poisoned), []))
    bare = replace(recipe, settings=recipe.settings.model_copy(update={"anchors": 0.0}))
    found = []
    for way, arriving, chosen in (
        (CLEAN, stream.arriving, recipe),
        (ANCHORED, mixed(stream.arriving, poisoned), recipe),
        (BARE, mixed(stream.arriving, poisoned), bare),
    ):
        report(f"{stream.name}, {kind}: {way}, {len(arriving)} records")
        drafter.load_weights(start)
        online = Online(drafter, chosen, offline)
        online.serve(arriving)
        clean = total([one.counts for one in offline.measure(online.in_service, stream.unseen)])
        found.append(Poisoned(way, clean, copied(online.served)))
    return found


def _permuted(drafter: Trainable, random: np.random.Generator) -> None:
    """The rows of every weight matrix in another order."""
    for _, weight in sorted(drafter.weights().items()):
        if weight.dim() >= 2:
            with torch.no_grad():
                weight.copy_(weight[..., torch.from_numpy(random.permutation(weight.shape[-2])), :])


def _not_a_number(drafter: Trainable, random: np.random.Generator) -> None:
    """One number of one weight."""
    weights = [weight for _, weight in sorted(drafter.weights().items()) if weight.is_floating_point()]
    weight = weights[random.integers(len(weights))]
    with torch.no_grad():
        weight.view(-1)[random.integers(weight.numel())] = torch.nan


def _shifted_map(drafter: Trainable, random: np.random.Generator) -> None:
    """Each draft token means the target token after the right one, and the two maps agree on it."""
    assert isinstance(drafter, _MAPPED)  # noqa: S101  the others are not corrupted so
    step = int(random.integers(1, 8))
    ids = (drafter.draft_ids + step) % len(drafter.t2d)
    drafter.set_vocabulary(ids.sort().values)


SHIFTED_MAP = "vocabulary map shifted"

CORRUPTIONS: dict[str, Callable[[Trainable, np.random.Generator], None]] = {
    "weights permuted": _permuted,
    SHIFTED_MAP: _shifted_map,
    "NaN": _not_a_number,
}
"""What may happen to a candidate on its way to the gate."""


def corrupted(
    experiment: Experiment, stream: Stream, drafter: Trainable, recipe: Recipe, trials: int, seed: int = 0
) -> dict[str, tuple[int, int]]:
    """Bring corrupted copies of ``drafter`` to the gate, which compares them with it; (promoted, tried) of each kind.

    The gate sees what ``trainer.held_out`` keeps aside of the stream.

    Raises:
        RecordingError: that is too little to judge by.
    """
    replay = empty_replay(recipe.settings, recipe.seed, enough=0)
    for trace in stream.arriving:
        replay.add(trace)
    batches = list(held_out(replay))
    gate = Gate(recipe.depth, recipe.settings.divergence)
    random = np.random.default_rng(seed)
    names = [name for name in CORRUPTIONS if name != SHIFTED_MAP or isinstance(drafter, _MAPPED)]
    found: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))
    for trial in range(trials):
        name = names[trial % len(names)]
        candidate = deepcopy(drafter)
        CORRUPTIONS[name](candidate, random)
        verdict = gate.judge(candidate, drafter, lambda: batches)
        if verdict.waits:
            raise RecordingError(f"{stream.name}: {verdict.reason}; take more records")
        promoted, tried = found[name]
        found[name] = promoted + verdict.passed, tried + 1
        experiment.report(f"corrupted candidate {trial + 1} of {trials}, {name}: {verdict.reason}")
    return found
