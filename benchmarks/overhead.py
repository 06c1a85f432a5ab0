"""What growing and verifying drafts cost beside the forwards of a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.isolated import forward_seconds
from osd.engine.request import SamplingParams
from osd.runtime.model import SlotModel
from osd.speculation.compatibility import IncompatibleError, compatible
from osd.speculation.distributions import LazyProbabilities
from osd.speculation.growth import GROWTHS, Growth, Reach
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import Draw, TreeBuilder
from osd.speculation.verification import VERIFICATIONS

_STATES = 64  # different distributions
_PEAK, _DISAGREEMENT = 1.5, 0.5  # of the distributions: Zipf's exponent, and noise between the two models' logits


@dataclass
class Cost:
    """Median seconds of a round's parts for one growth policy.

    ``grow`` is what growing takes beside ``calls`` forwards of the drafter, ``verify`` each rule's decision, with
    making p of the target's logits as far as it reads them; the target's ``forward`` has ``rows`` rows.
    """

    growth: str
    rows: int
    calls: float
    grow: float
    forward: float
    verify: dict[str, float] = field(default_factory=dict)

    def share(self, rule: str) -> float:
        """Of a round in which the drafter takes no time: everything but the forward."""
        work = self.grow + self.verify[rule]
        return work / (work + self.forward)


class _Models:
    """A drafter and a target without layers; a node's logits depend on its sequence and number."""

    support: Tensor | None = None

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(_STATES, vocabulary, generator=generator)
        rank = noise.argsort(-1).argsort(-1) + 1.0
        self._draft = -_PEAK * rank.log()
        self._target = self._draft + _DISAGREEMENT * torch.randn(_STATES, vocabulary, generator=generator)
        self.levels: int | None = None
        self.block = 1
        self.reach: Reach | None = None
        self.seconds, self.calls = 0.0, 0
        self._acceptance = torch.empty(0)

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        begun = time.perf_counter()
        logits = self._draft[_state(rows, nodes + 1)]
        self.seconds += time.perf_counter() - begun
        self.calls += 1
        self._acceptance = logits.new_ones(len(rows))
        return logits

    def acceptance(self) -> Tensor:
        return self._acceptance

    def target(self, rows: Tensor, places: Tensor) -> Tensor:
        return self._target[_state(rows, places)]


def _state(rows: Tensor, places: Tensor) -> Tensor:
    return (rows * 37 + places) % _STATES


def policies(budget: int) -> Iterator[tuple[str, Growth]]:
    """Every growth policy with drafts of about ``budget`` tokens."""
    ranks = (0.5, 0.15, 0.08, 0.05)
    yield "chain", GROWTHS["chain"](depth=budget)
    yield "confidence", GROWTHS["confidence"](depth=budget, eta=0.0)
    yield "acceptance_head", GROWTHS["acceptance_head"](depth=budget, h=1.0)
    yield "dynamic_tree", GROWTHS["dynamic_tree"](budget=budget)
    yield "dynamic_tree, threshold", GROWTHS["dynamic_tree"](budget=budget, threshold=1 / budget)
    for draw in (Draw.WITHOUT_REPLACEMENT, Draw.IID, Draw.TOP_THEN_DRAWN):
        yield f"static_tree, {draw.value}", GROWTHS["static_tree"](acceptance=ranks, budget=budget, draw=draw)
    yield "sparse_tree", GROWTHS["sparse_tree"]([ranks] * 8, budget=budget)
    yield "top_k_tree", GROWTHS["top_k_tree"](budget=budget)


@torch.inference_mode()
def measure(
    target: SlotModel,
    batch: int,
    budget: int,
    sampling: SamplingParams,
    rounds: int = 5,
    report: Callable[[str], None] = lambda growth: None,
) -> list[Cost]:
    """Time every policy with every rule that fits it, on distributions over the target's vocabulary.

    Args:
        target: with ``batch`` slots, a context of 129 tokens and scratch for the budget.
        batch: sequences.
        budget: draft tokens of each.
        sampling: of all sequences; a temperature above 0.
        rounds: to take the median of, after one to warm up.
        report: told which policy comes next.
    """
    models, costs = _Models(target.vocab_size), []
    forwards: dict[int, float] = {}
    for name, growth in policies(budget):
        report(name)
        costs.append(_policy(models, target, name, growth, batch, sampling, rounds, forwards))
    return costs


def _policy(
    models: _Models,
    target: SlotModel,
    name: str,
    growth: Growth,
    batch: int,
    sampling: SamplingParams,
    rounds: int,
    forwards: dict[int, float],
) -> Cost:
    settings, index = SamplingBatch.of([sampling] * batch), torch.arange(batch)
    limits = torch.full_like(index, growth.max_nodes)
    rules = [rule for rule in VERIFICATIONS.values() if _fits(growth, rule.name)]
    grow, rows = [], []
    verify: dict[str, list[float]] = {rule.name: [] for rule in rules}
    models.calls = 0
    for step in range(rounds + 1):
        noise = Noise(index, torch.zeros_like(index), torch.full_like(index, step))
        models.seconds = 0.0
        begun = time.perf_counter()
        draft = growth.grow(models, settings, noise, limits)
        grow.append(time.perf_counter() - begun - models.seconds)
        width = draft.tokens.shape[1] + 1
        owners = index.repeat_interleave(width)
        logits = models.target(owners, torch.arange(width).repeat(batch))
        rows.append(int(draft.sizes.sum()) + batch)
        places = torch.arange(len(logits)).view(batch, width)
        for rule in rules:
            begun = time.perf_counter()
            rule.verify(draft, LazyProbabilities(logits, owners, places, settings), noise)
            verify[rule.name].append(time.perf_counter() - begun)
    each = -(-round(statistics.mean(rows)) // batch)
    if each not in forwards:
        forwards[each] = min([forward_seconds(target, batch, each) for _ in range(3)][1:])
    return Cost(
        growth=name,
        rows=each * batch,
        calls=models.calls / (rounds + 1),
        grow=statistics.median(grow[1:]),
        forward=forwards[each],
        verify={name: statistics.median(seconds[1:]) for name, seconds in verify.items()},
    )


def _fits(growth: Growth, rule: str) -> bool:
    try:
        compatible(growth, VERIFICATIONS[rule])
    except IncompatibleError:
        return False
    return True
