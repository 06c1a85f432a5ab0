"""Exact output laws of growth policies and rules, by enumeration of all random outcomes.

``ForkingNoise`` replaces ``Noise``. For each key it stores the interval of its uniform number; a decision that the
interval does not determine splits it. So a key that is used twice is enumerated exactly as well, and its error shows.
Each row of a batch follows a script of choices; each alternative becomes a row of a later batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from osd.drafting.growth import DraftBudget, Growth, Reach
from osd.verification import Rule, Verdict
from osd.verification.noise import Purpose
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder

BATCH = 512


def check_integrity(draft: DraftBatch) -> None:
    """Check the assumptions of the rules.

    Raises:
        ValueError: a node comes before its parent, a token differs from the token of its column, a drawn token has
            probability 0, or siblings were drawn in different ways.
    """
    count = draft.tokens.shape[1]
    valid, index = draft.valid, torch.arange(count, device=draft.tokens.device)
    if not ((draft.parents >= ROOT) & (draft.parents < index))[valid].all():
        raise ValueError("a node of the draft tree does not come after its parent")
    has_q = valid & (draft.q_row >= 0)
    columns, rows = draft.columns[has_q], draft.q_row[has_q]
    if draft.q_ids is not None:
        ids = draft.q_ids[rows, columns]
    else:
        ids = columns if draft.support is None else draft.support[columns]
    if not torch.equal(ids, draft.tokens[has_q]):
        raise ValueError("a token of the draft tree differs from the token of its column in the draft vocabulary")
    if not ((draft.source >= 0) & (draft.source < len(draft.sources)))[valid].all():
        raise ValueError("a node of the draft tree has no source")
    iid = draft.drawn(Draw.IID)
    if not (has_q | draft.drawn(Draw.DETERMINISTIC))[valid].all() or (draft.q is None and has_q.any()):
        raise ValueError("a token of the draft tree was drawn, but from no distribution")
    if (iid & valid).any() and not (draft.shares()[iid & valid] > 0).all():
        raise ValueError("a token of the draft tree has probability 0 in the distribution it was drawn from")
    twins = (draft.parents[:, :, None] == draft.parents[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    if not (draft.q_row[:, :, None] == draft.q_row[:, None, :])[twins].all():
        raise ValueError("siblings of the draft tree name different distributions")
    if not (draft.draw[:, :, None] == draft.draw[:, None, :])[twins].all():
        raise ValueError("siblings of the draft tree were drawn in different ways")
    equal = twins & (draft.tokens[:, :, None] == draft.tokens[:, None, :]) & ~iid[:, :, None]
    if equal.sum() != (valid & ~iid).sum():
        raise ValueError("a token of the draft tree occurs twice under a parent though drawn without replacement")


class ForkingNoise:
    """Random numbers whose outcomes are all enumerated."""

    def __init__(self, scripts: list[tuple[int, ...]]) -> None:
        self.scripts = scripts
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.weights = [1.0] * len(scripts)
        self.intervals: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in scripts]
        self.alternatives: list[tuple[int, ...]] = []
        self.index = list(range(len(scripts)))

    def rows(self, index: Tensor) -> ForkingNoise:
        chosen = object.__new__(type(self))
        chosen.__dict__.update(self.__dict__)
        chosen.index = [self.index[i] for i in index.tolist()]
        return chosen

    def key(self, purpose: Purpose, index: int) -> tuple[int, int]:
        return int(purpose), index

    def _fork(self, row: int, key: tuple[int, int], edges: list[float]) -> int:
        """Choose among the parts of (0, 1) with upper ends ``edges``, and store the alternatives."""
        low, high = self.intervals[row].get(key, (0.0, 1.0))
        choices, start = [], 0.0
        for choice, end in enumerate(edges):
            a, b = max(low, start), min(high, end)
            if b > a:
                choices.append((choice, a, b))
            start = max(start, end)
        taken = self.taken[row]
        if len(taken) < len(self.scripts[row]):
            scripted = self.scripts[row][len(taken)]
            choice, a, b = next(c for c in choices if c[0] == scripted)
        else:
            choice, a, b = choices[0]
            self.alternatives.extend((*taken, other) for other, _, _ in choices[1:])
        taken.append(choice)
        self.weights[row] *= (b - a) / (high - low)
        self.intervals[row][key] = (a, b)
        return choice

    def accept(self, probability: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        grid = torch.as_tensor(index).expand(probability.shape).reshape(-1).tolist()
        width = probability[0].numel() if len(probability) else 1
        flat = probability.reshape(-1).tolist()
        out = [
            a > 0 and (a >= 1 or self._fork(self.index[i // width], self.key(purpose, grid[i]), [a, 1.0]) == 0)
            for i, a in enumerate(flat)
        ]
        return torch.tensor(out, dtype=torch.bool).reshape(probability.shape)

    def pick(self, weights: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        if not len(weights):
            return torch.zeros(0, dtype=torch.int64)
        edges = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
        edges[:, -1] = torch.where(weights[:, -1] > 0, 1.0, edges[:, -1])
        grid = torch.as_tensor(index).expand(len(weights)).tolist()
        rows = edges.tolist()
        return torch.tensor([self._fork(self.index[i], self.key(purpose, grid[i]), e) for i, e in enumerate(rows)])


@dataclass(frozen=True)
class Toy:
    """Target and drafter over a small vocabulary, whose distributions depend on the whole history.

    The empty history has code 0; token t after code c gives code c * V + 1 + t.

    Attributes:
        p: [H, V], the target's distribution after each history code.
        q: [H, V] or [H, Vd], the drafter's distribution after each history code.
        vocabulary: V.
        support: [Vd], token ids of the draft vocabulary.
        roots: [B], history codes of the sequences; None for empty histories.
        levels: length limit of drafted paths.
        block: tokens of a path per call.
        reach: of the drafter in each sequence.
        expanded: codes of the nodes of the last call.
    """

    p: Tensor
    q: Tensor
    vocabulary: int
    support: Tensor | None = None
    roots: Tensor | None = None
    levels: int | None = None
    block: int = 1
    reach: Reach | None = None
    expanded: list[Tensor] = field(default_factory=list)

    @classmethod
    def random(
        cls, seed: int, vocabulary: int, depth: int, agreement: float = 0.5, sparse: bool = False, support: int = 0
    ) -> Toy:
        """Return random distributions for all histories of up to ``depth`` tokens, with zeros if ``sparse``."""
        generator = torch.Generator().manual_seed(seed)
        histories = sum(vocabulary**d for d in range(depth + 1))

        def table(width: int) -> Tensor:
            x = torch.rand(histories, width, generator=generator, dtype=torch.float64) ** 2 + 1e-3
            if sparse:
                x[:, 1:] *= torch.rand(histories, width - 1, generator=generator) < 0.7
            return x / x.sum(-1, keepdim=True)

        p = table(vocabulary)
        ids = torch.randperm(vocabulary, generator=generator)[:support].sort().values if support else None
        near = p if ids is None else p[:, ids] + 1e-3
        q = agreement * near / near.sum(-1, keepdim=True) + (1 - agreement) * table(near.shape[1])
        return cls(p, q / q.sum(-1, keepdim=True), vocabulary, ids)

    def codes(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the history codes [B, N] of nodes."""
        codes = torch.zeros_like(tokens)
        rows, roots = torch.arange(len(tokens)), self._roots(len(tokens))
        for node in range(tokens.shape[1]):
            parent = parents[:, node]
            above = torch.where(parent >= 0, codes[rows, parent.clamp(min=0)], roots)
            codes[:, node] = above * self.vocabulary + 1 + tokens[:, node].clamp(min=0)
        return codes

    def _roots(self, batch: int) -> Tensor:
        return torch.zeros(batch, dtype=torch.int64) if self.roots is None else self.roots

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        codes = self.codes(builder.tokens, builder.parents)
        wide = torch.cat([self._roots(len(codes))[:, None], codes], 1)
        self.expanded[:] = [wide[rows, nodes + 1]]
        return self.q[self.expanded[0]].log()

    def acceptance(self) -> Tensor:
        """Return the estimates of a head that differs after each history."""
        return (self.expanded[0] * 0.6180339887) % 1

    def target(self, draft: DraftBatch) -> Tensor:
        """Return the target's distributions [B, N + 1, V] after the root and after each node."""
        codes = self.codes(draft.tokens, draft.parents).masked_fill(~draft.valid, 0)
        return self.p[torch.cat([self._roots(len(codes))[:, None], codes], 1)]


@dataclass(frozen=True)
class Law:
    """Largest error of an output law, mean accepted length, and number of enumerated outcomes."""

    error: float
    accepted: float
    ways: int


Step = Callable[[ForkingNoise, int], tuple[DraftBatch, Verdict]]


def law_of(step: Step, toy: Toy, length: int, kind: type[ForkingNoise] = ForkingNoise) -> Law:
    """Enumerate a decoding step and compare the law of the first ``length`` tokens with the target's law.

    Longer outputs are cut off; the target continues shorter outputs.
    """
    vocabulary = toy.vocabulary
    mass = torch.zeros(sum(vocabulary**d for d in range(length + 1)), dtype=torch.float64)
    pending: list[tuple[int, ...]] = [()]
    accepted, ways = 0.0, 0
    while pending:
        scripts, pending = pending[:BATCH], pending[BATCH:]
        noise = kind(scripts)
        draft, verdict = step(noise, len(scripts))
        weights = torch.tensor(noise.weights, dtype=torch.float64)
        codes = torch.zeros(len(scripts), dtype=torch.int64)
        rows = torch.arange(len(scripts))
        for place in range(length):
            on_path = place < verdict.accepted
            node = verdict.path[:, min(place, verdict.path.shape[1] - 1)] if verdict.path.shape[1] else verdict.accepted
            drafted = draft.tokens[rows, node.clamp(min=0)] if draft.tokens.shape[1] else verdict.token
            token = torch.where(on_path, drafted, verdict.token)
            codes = torch.where(place <= verdict.accepted, codes * vocabulary + 1 + token, codes)
        mass.index_add_(0, codes, weights)
        accepted += float((weights * verdict.accepted).sum())
        ways += len(scripts)
        pending += noise.alternatives
    goal = torch.zeros_like(mass)
    goal[0] = 1.0
    inner = sum(vocabulary**d for d in range(length))
    for code in range(inner):
        children = slice(code * vocabulary + 1, (code + 1) * vocabulary + 1)
        goal[children] = goal[code] * toy.p[code]
        mass[children] += mass[code] * toy.p[code]
    assert abs(float(mass[inner:].sum()) - 1) < 1e-9
    return Law(float((mass[inner:] - goal[inner:]).abs().max()), accepted, ways)


def as_if(draft: DraftBatch, draw: Draw) -> DraftBatch:
    """Return the draft with a wrong way of drawing."""
    return replace(draft, draw=torch.full_like(draft.draw, draw.code))


def plain_sampling(batch: int) -> SamplingBatch:
    return SamplingBatch.of([SamplingParams()] * batch)


def step_of(growth: Growth, rule: Rule, toy: Toy, limit: int = 1_000) -> Step:
    """Return a decoding step of a growth policy and a rule."""

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = growth.grow(toy, plain_sampling(batch), noise, DraftBudget(torch.full((batch,), limit)))
        check_integrity(draft)
        return draft, rule.verify(draft, toy.target(draft), noise)

    return run


def largest_error(growth: Growth, verify: Callable[..., Verdict], spoil: Callable[[DraftBatch], DraftBatch]) -> float:
    """Return the largest error of the output law over toy models, if ``spoil`` changes each draft."""
    errors = []
    for seed in range(4):
        toy = Toy.random(seed, 3, 3, agreement=0.2)

        def run(noise: ForkingNoise, batch: int, toy: Toy = toy) -> tuple[DraftBatch, Verdict]:
            draft = spoil(
                growth.grow(toy, plain_sampling(batch), noise, DraftBudget(torch.full((batch,), growth.max_nodes)))
            )
            return draft, verify(draft, toy.target(draft), noise)

        errors.append(law_of(run, toy, 3).error)
    print(f"largest error {max(errors):.3g}")
    return max(errors)
