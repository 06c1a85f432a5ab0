"""Evaluation of a drafter on held-out positions: scores of each position, and figures over all positions."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from osd.drafting.trainable import Trainable
from osd.learning.batch import DistillBatch, RecordPart
from osd.learning.divergences import DIVERGENCES, draft_index, overlap, places
from osd.metrics import acceptance_rate, mean_acceptance_length

_MAX_RECORDS = 1024  # in the cache of scores


@dataclass(frozen=True)
class Scores:
    """Scores of N positions, as float64 on the host.

    Values are undefined where ``DistillBatch.rows_at`` is False for the depth.

    Attributes:
        accepted: [N, depth] expected acceptance sum_v min(p, q) at each depth.
        kept: [N, depth] expected acceptance of the drafter's first choice by the request itself. For a greedy request
            it is 1 if the choice is the target's most probable token, else 0. For other requests it equals
            ``accepted``.
        divergence: [N] divergence at the first depth.
    """

    accepted: Tensor
    kept: Tensor
    divergence: Tensor

    def select(self, rows: Tensor) -> Scores:
        """Return the scores of some positions, [N] bool."""
        return Scores(self.accepted[rows], self.kept[rows], self.divergence[rows])


class Scorer:
    """Scorer of one drafter over chains of ``depth`` tokens; it does not change the drafter or its mode."""

    def __init__(self, drafter: Trainable, depth: int, divergence: str) -> None:
        self._drafter, self.depth, self._divergence = drafter, depth, DIVERGENCES[divergence]
        self._index = draft_index(drafter.draft_ids)

    @torch.inference_mode()
    def score(self, batch: DistillBatch) -> Scores:
        """Return the scores of all positions of a batch; the training mode of the drafter is restored."""
        training = self._drafter.training
        self._drafter.eval()
        try:
            logits = self._drafter.unroll(batch, self.depth)
        finally:
            self._drafter.train(training)
        accepted = torch.zeros(batch.positions, self.depth, dtype=torch.float64, device=batch.place.device)
        kept, divergence = accepted.clone(), accepted.new_zeros(batch.positions)
        greedy, best = batch.greedy[batch.sequence], places(batch.target_ids[:, 0], self._index)
        for d, level in enumerate(logits):
            events = overlap(level, batch.target_ids, batch.target_logp, batch.target_tail, self._index)
            if d == 0:
                divergence = self._divergence(events).double()
            accepted[:, d] = events.accepted().double()
            kept[:, d] = torch.where(greedy, (level.argmax(-1) == best).double(), accepted[:, d])
        return Scores(accepted.cpu(), kept.cpu(), divergence.cpu())


class CachedScorer(Scorer):
    """Scorer of a drafter with constant weights, which keeps the scores of the last records."""

    def __init__(self, drafter: Trainable, depth: int, divergence: str) -> None:
        super().__init__(drafter, depth, divergence)
        self._cache: OrderedDict[RecordPart, Scores] = OrderedDict()

    def score(self, batch: DistillBatch) -> Scores:
        """Return the scores of the positions of a batch, from the cache if it has all records."""
        cached = [self._cache[record] for record in batch.records if record in self._cache]
        if cached and len(cached) == len(batch.records):
            for record in batch.records:
                self._cache.move_to_end(record)
            return Scores(
                *(torch.cat(parts) for parts in zip(*((s.accepted, s.kept, s.divergence) for s in cached), strict=True))
            )
        scores, sequence = super().score(batch), batch.sequence.cpu()
        for row, record in enumerate(batch.records):
            self._cache[record] = scores.select(sequence == row)
        while len(self._cache) > _MAX_RECORDS:
            self._cache.popitem(last=False)
        return scores


@dataclass(frozen=True)
class GateFigures:
    """Figures of a drafter over held-out positions.

    Attributes:
        positions: number of evaluated completion positions.
        per_depth: expected acceptance at each depth of a chain: the mean over positions of sum_v min(p(v), q(v)), with
            p of the target and q of the drafter. It is a lower bound, because only the ids v in the trace count. A
            depth without positions has 0.
        divergence: mean divergence at depth 0, in the unit of ``trainer.divergence``: nats or total variation.
        overlaps: [positions] the expected acceptance of each position, averaged over its depths and multiplied by its
            weight.
        groups: [positions] index of the sequence of each position.
        weight: mean weight of the positions; with recall, the share of positions that recall does not predict.
        trace_weight: [positions] number of positions of the traffic that each position represents, used in all means;
            None when all traffic was captured.
        kept_per_depth: mean of ``Scores.kept`` at each depth; equal to ``per_depth`` without greedy requests.
    """

    positions: int
    per_depth: tuple[float, ...]
    divergence: float
    overlaps: Tensor
    groups: Tensor
    weight: float
    trace_weight: Tensor | None
    kept_per_depth: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Expected accepted tokens of a round that drafts a chain of all depths: sum_d prod_{i <= d} alpha_i."""
        return _accepted(self.per_depth)

    @property
    def acceptance(self) -> float:
        """Expected acceptance rate of the chain: accepted tokens per drafted token."""
        return acceptance_rate(self.accepted, len(self.per_depth))

    @property
    def expected_length(self) -> float:
        """Expected acceptance length in tokens, the bonus token included."""
        return length_of(self.per_depth)

    @property
    def length_with_recall(self) -> float:
        """Expected tokens per decoding step of a request when recall drafts too.

        At each depth recall already predicts a share ``1 - weight`` of the positions.
        """
        return length_of(1 - self.weight + self.weight * alpha for alpha in self.kept_per_depth)

    def summary(self) -> dict[str, Any]:
        """Return the figures without the tensors, as JSON values for manifests, events and logs."""
        return {
            "positions": self.positions,
            "acceptance": round(self.acceptance, 4),
            "expected_length": round(self.expected_length, 4),
            "per_depth": [round(alpha, 4) for alpha in self.per_depth],
            "kept_per_depth": [round(alpha, 4) for alpha in self.kept_per_depth],
            "divergence": round(self.divergence, 4),
            "weight": round(self.weight, 4),
        }


def length_of(per_depth: Iterable[float]) -> float:
    """Return tokens per decoding step, the bonus token included, of chains with these acceptance rates by depth."""
    return mean_acceptance_length(_accepted(per_depth), rounds=1)


def _accepted(per_depth: Iterable[float]) -> float:
    return sum(accumulate(per_depth, mul))


def weighted_mean(values: Tensor, weights: Tensor | None) -> float:
    """Return the mean of values [N], weighted by ``weights`` [N] if present."""
    return float(values.mean() if weights is None else (values * weights).sum() / weights.sum())


class ExpectedAcceptance(Metric):
    """Weighted mean over positions, at each depth of a chain, of the probability that the chain rule accepts.

    For a token drawn from q it is sum_v min(p, q), one minus the total variation between p and q (Leviathan et al.,
    2023). A depth without positions has 0. The metric does not synchronise between processes, because other ranks of a
    trainer do not evaluate.
    """

    full_state_update = False
    accepted: Tensor
    weights: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("accepted", torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weights", torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor, valid: Tensor, weight: Tensor) -> None:
        """Add positions.

        Args:
            accepted: [positions, depth] acceptance probability at each depth.
            valid: [positions, depth] whether the position has this depth.
            weight: [positions] weight of each position.
        """
        counts = valid * weight[:, None]
        self.accepted += (torch.where(valid, accepted, 0.0) * counts).sum(0)
        self.weights += counts.sum(0)

    def compute(self) -> Tensor:
        """Return the mean at each depth, [depth]."""
        return self.accepted / self.weights.clamp(min=1e-9)


class Evaluation:
    """Evaluation of a drafter on captured distributions, as chains of tokens.

    Positions count by their weight and by the traffic that they represent. Evaluations of the same batches in the same
    order can be compared position by position.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Create an evaluation without positions."""
        self._scorer, self._depth = scorer, scorer.depth
        self._expected, self._kept = ExpectedAcceptance(self._depth), ExpectedAcceptance(self._depth)
        self._columns: defaultdict[str, list[Tensor]] = defaultdict(list)  # by name, a tensor for each batch
        self._sampled = False
        self.positions = self.sequences = 0

    @torch.inference_mode()
    def add(self, batch: DistillBatch) -> Tensor:
        """Add a batch.

        Returns:
            The mean of ``GateFigures.overlaps`` of each sequence that has positions. When not all traffic was captured,
            each mean is multiplied by the sequence's trace weight relative to the largest one.
        """
        scores = self._scorer.score(batch)
        valid = torch.stack([batch.rows_at(d) for d in range(self._depth)], 1).cpu()  # [N, depth]
        ones = torch.ones(len(valid), dtype=torch.float64)
        weight = ones if batch.weight is None else batch.weight
        trace_weight = ones if batch.trace_weight is None else batch.trace_weight
        self._sampled |= batch.trace_weight is not None
        seen = valid[:, 0]  # positions that depth 0 cannot predict are left out
        new = {"divergences": scores.divergence, "weights": weight, "trace_weight": trace_weight}
        new["groups"] = batch.sequence.cpu() + self.sequences
        new["overlaps"] = weight * torch.where(valid, scores.accepted, 0.0).sum(1) / valid.sum(1).clamp(min=1)
        for expected, each in ((self._expected, scores.accepted), (self._kept, scores.kept)):
            expected.update(each, valid, weight * trace_weight)
        for name, values in new.items():
            self._columns[name].append(values[seen])
        overlaps, sequence = self._columns["overlaps"][-1], batch.sequence.cpu()[seen]
        self.sequences += len(batch.lengths)
        self.positions += len(overlaps)
        count = torch.bincount(sequence, minlength=len(batch.lengths))
        relative = overlaps if batch.trace_weight is None else overlaps * trace_weight[seen] / batch.max_trace_weight
        return (torch.bincount(sequence, relative, minlength=len(count)) / count)[count > 0]

    def over(self, batches: Iterable[DistillBatch]) -> GateFigures:
        """Add all ``batches`` and return the figures."""
        for batch in batches:
            self.add(batch)
        return self.figures()

    def figures(self) -> GateFigures:
        """Return the figures of all batches so far."""
        if not self._columns:
            zeros, empty = (0.0,) * self._depth, torch.empty(0, dtype=torch.float64)
            return GateFigures(0, zeros, 0.0, empty, empty.long(), 1.0, None, zeros)
        columns = {name: torch.cat(parts) for name, parts in self._columns.items()}
        trace_weight = columns["trace_weight"] if self._sampled else None
        return GateFigures(
            positions=self.positions,
            per_depth=tuple(self._expected.compute().view(self._depth).tolist()),
            divergence=weighted_mean(columns["divergences"], trace_weight) if self.positions else 0.0,
            overlaps=columns["overlaps"],
            groups=columns["groups"],
            weight=weighted_mean(columns["weights"], trace_weight) if self.positions else 1.0,
            trace_weight=trace_weight,
            kept_per_depth=tuple(self._kept.compute().view(self._depth).tolist()),
        )


def evaluate(drafter: Trainable, batches: Iterable[DistillBatch], depth: int, divergence: str) -> GateFigures:
    """Return the figures of a drafter over all ``batches``; see ``Evaluation``."""
    return Evaluation(Scorer(drafter, depth, divergence)).over(batches)
