"""Exact output laws of the real growth policies and rules, by following every outcome of their randomness.

``ForkingNoise`` stands where ``Noise`` stands. It knows for each key only an interval in which its uniform number lies;
a decision that the interval leaves open splits it. So a key that is used twice is followed exactly too, and shows.
Every row of the batch follows one script of choices; each choice not taken becomes a row of a later batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from osd.drafting.growth import Budget, Growth, Reach
from osd.verification import Rule, Verdict
from osd.verification.noise import Purpose
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder

BATCH = 512


def check_integrity(draft: DraftBatch) -> None:
    """Check what the rules rely on.

    Raises:
        ValueError: a node comes before its parent, a token is not its column's, one was drawn that q excludes, or
            siblings were not drawn alike.
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
        raise ValueError("a token of the draft tree is not the one that its column of the draft vocabulary means")
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
        raise ValueError("a token of the draft tree stands twice under one parent though drawn without replacement")


class ForkingNoise:
    """Randomness whose every outcome is followed."""

    def __init__(self, scripts: list[tuple[int, ...]]) -> None:
        self.scripts = scripts
        self.taken: list[list[int]] = [[] for _ in scripts]
        self.weights = [1.0] * len(scripts)
        self.intervals: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in scripts]
        self.others: list[tuple[int, ...]] = []
        self.index = list(range(len(scripts)))

    def rows(self, index: Tensor) -> ForkingNoise:
        chosen = object.__new__(type(self))
        chosen.__dict__.update(self.__dict__)
        chosen.index = [self.index[i] for i in index.tolist()]
        return chosen

    def key(self, purpose: Purpose, index: int) -> tuple[int, int]:
        return int(purpose), index

    def _fork(self, row: int, key: tuple[int, int], edges: list[float]) -> int:
        """Choose between the pieces of (0, 1) that ``edges`` ends, and remember the pieces not chosen."""
        low, high = self.intervals[row].get(key, (0.0, 1.0))
        choices, start = [], 0.0
        for choice, end in enumerate(edges):
            a, b = max(low, start), min(high, end)
            if b > a:
                choices.append((choice, a, b))
            start = max(start, end)
        taken = self.taken[row]
        if len(taken) < len(self.scripts[row]):
            wanted = self.scripts[row][len(taken)]
            choice, a, b = next(c for c in choices if c[0] == wanted)
        else:
            choice, a, b = choices[0]
            self.others.extend((*taken, other) for other, _, _ in choices[1:])
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
    """A target and a drafter over a small vocabulary whose distributions depend on the whole history.

    ``p`` and ``q`` [H, V] or [H, Vd]: row ``code`` is the distribution after the history of that code; the empty
    history has code 0 and appending token t to code c gives c * V + 1 + t.
    """

    p: Tensor
    q: Tensor
    vocabulary: int
    support: Tensor | None = None
    roots: Tensor | None = None  # [B] history codes that sequences stand on, the empty history when None
    levels: int | None = None  # tokens of the longest path that may be drafted
    block: int = 1  # tokens of a path that come of one call
    reach: Reach | None = None  # how far it sees in each sequence
    judged: list[Tensor] = field(default_factory=list)  # codes of the nodes that were asked about last

    @classmethod
    def random(
        cls, seed: int, vocabulary: int, depth: int, agreement: float = 0.5, sparse: bool = False, support: int = 0
    ) -> Toy:
        """Random distributions for every history of up to ``depth`` tokens; ``sparse`` ones have zeros in places."""
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
        """[B, N] history codes of nodes."""
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
        self.judged[:] = [wide[rows, nodes + 1]]
        return self.q[self.judged[0]].log()

    def acceptance(self) -> Tensor:
        """A head that knows the whole history and says something else after each."""
        return (self.judged[0] * 0.6180339887) % 1

    def target(self, draft: DraftBatch) -> Tensor:
        """[B, N + 1, V] what the target says after the root and after each node."""
        codes = self.codes(draft.tokens, draft.parents).masked_fill(~draft.valid, 0)
        return self.p[torch.cat([self._roots(len(codes))[:, None], codes], 1)]


@dataclass(frozen=True)
class Law:
    """What enumeration found: the largest error of the output law, the mean accepted length, how many ways it can
    go."""

    error: float
    accepted: float
    ways: int


Round = Callable[[ForkingNoise, int], tuple[DraftBatch, Verdict]]


def law_of(round_: Round, toy: Toy, length: int, kind: type[ForkingNoise] = ForkingNoise) -> Law:
    """Enumerate one round and compare the law of the first ``length`` tokens with the target's own.

    What a round emits beyond ``length`` is cut off; what it falls short of is continued by the target itself.
    """
    vocabulary = toy.vocabulary
    mass = torch.zeros(sum(vocabulary**d for d in range(length + 1)), dtype=torch.float64)
    pending: list[tuple[int, ...]] = [()]
    accepted, ways = 0.0, 0
    while pending:
        scripts, pending = pending[:BATCH], pending[BATCH:]
        noise = kind(scripts)
        draft, verdict = round_(noise, len(scripts))
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
        pending += noise.others
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
    """The same draft, whose siblings claim to have been drawn in another way."""
    return replace(draft, draw=torch.full_like(draft.draw, draw.code))


def plain_sampling(batch: int) -> SamplingBatch:
    return SamplingBatch.of([SamplingParams()] * batch)


def round_of(growth: Growth, rule: Rule, toy: Toy, limit: int = 1_000) -> Round:
    """One round of the real growth policy and the real rule."""

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = growth.grow(toy, plain_sampling(batch), noise, Budget(torch.full((batch,), limit)))
        check_integrity(draft)
        return draft, rule.verify(draft, toy.target(draft), noise)

    return run


def largest_error(growth: Growth, verify: Callable[..., Verdict], spoil: Callable[[DraftBatch], DraftBatch]) -> float:
    """Of the output law over some toy models, when ``spoil`` comes between a growth policy and what verifies."""
    errors = []
    for seed in range(4):
        toy = Toy.random(seed, 3, 3, agreement=0.2)

        def run(noise: ForkingNoise, batch: int, toy: Toy = toy) -> tuple[DraftBatch, Verdict]:
            draft = spoil(
                growth.grow(toy, plain_sampling(batch), noise, Budget(torch.full((batch,), growth.max_nodes)))
            )
            return draft, verify(draft, toy.target(draft), noise)

        errors.append(law_of(run, toy, 3).error)
    print(f"largest error {max(errors):.3g}")
    return max(errors)
