"""How well a drafter predicts held-out positions: scores of each one, and figures of all."""

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
from osd.learning.batch import DistillBatch, Record
from osd.learning.divergences import DIVERGENCES, draft_index, overlap, places
from osd.metrics import acceptance_rate, mean_acceptance_length

_RECORDS = 1024  # whose scores are kept


@dataclass(frozen=True)
class Scores:
    """How N positions are predicted.

    ``accepted`` [N, depth] is sum_v min(p, q) at each depth. ``kept`` [N, depth] is what the request itself keeps of
    the drafter's first choice: where it is greedy, 1 if that is the target's most probable token and else 0; the same
    as ``accepted`` where it draws. ``divergence`` [N] is that at the first depth.

    All are float64 on the host. Where a batch's ``rows_at`` says that a depth cannot predict a position they mean
    nothing.
    """

    accepted: Tensor
    kept: Tensor
    divergence: Tensor

    def of(self, rows: Tensor) -> Scores:
        """Those of some positions, [N] bool."""
        return Scores(self.accepted[rows], self.kept[rows], self.divergence[rows])


class Scorer:
    """Scores one drafter, which stays as it is, in its mode too, over a chain of ``depth`` tokens."""

    def __init__(self, drafter: Trainable, depth: int, divergence: str) -> None:
        self._drafter, self.depth, self._divergence = drafter, depth, DIVERGENCES[divergence]
        self._index = draft_index(drafter.draft_ids)

    @torch.inference_mode()
    def score(self, batch: DistillBatch) -> Scores:
        """The scores of a batch's positions."""
        training = self._drafter.training
        self._drafter.eval()
        try:
            logits = self._drafter.unroll(batch, self.depth)
        finally:
            self._drafter.train(training)
        accepted = torch.zeros(batch.positions, self.depth, dtype=torch.float64, device=batch.place.device)
        kept, divergence = accepted.clone(), accepted.new_zeros(batch.positions)
        greedy, wanted = batch.greedy[batch.sequence], places(batch.target_ids[:, 0], self._index)
        for d, level in enumerate(logits):
            events = overlap(level, batch.target_ids, batch.target_logp, batch.target_tail, self._index)
            if d == 0:
                divergence = self._divergence(events).double()
            accepted[:, d] = events.accepted().double()
            kept[:, d] = torch.where(greedy, (level.argmax(-1) == wanted).double(), accepted[:, d])
        return Scores(accepted.cpu(), kept.cpu(), divergence.cpu())


class KnownScores(Scorer):
    """The same for a drafter whose weights do not change any more: what it scored before is not computed again."""

    def __init__(self, drafter: Trainable, depth: int, divergence: str) -> None:
        super().__init__(drafter, depth, divergence)
        self._known: OrderedDict[Record, Scores] = OrderedDict()

    def score(self, batch: DistillBatch) -> Scores:
        found = [self._known.get(record) for record in batch.records]
        known = [one for one in found if one is not None]
        if known and len(known) == len(found):
            for record in batch.records:
                self._known.move_to_end(record)
            return Scores(
                *(torch.cat(parts) for parts in zip(*((s.accepted, s.kept, s.divergence) for s in known), strict=True))
            )
        scores, sequence = super().score(batch), batch.sequence.cpu()
        for row, record in enumerate(batch.records):
            self._known[record] = scores.of(sequence == row)
        while len(self._known) > _RECORDS:
            self._known.popitem(last=False)
        return scores


@dataclass(frozen=True)
class GateFigures:
    """A drafter's figures over held-out positions.

    Attributes:
        positions: completion positions that were evaluated.
        per_depth: expected acceptance at each depth of a chain: the mean over positions of sum_v min(p, q). Only the
            kept ids count, so that it is a lower bound; a depth that no position reaches has 0.
        divergence: mean divergence at depth 0, in nats or as total variation.
        overlaps: [positions] the same acceptance of each position, averaged over the depths that it has, times its
            weight.
        groups: [positions] the sequence that each position belongs to.
        weight: the mean of the positions' weights: beside recall, the share that it leaves open.
        stands_for: [positions] how many positions of the traffic each stands for, by which all means are taken; None
            where all of the traffic was kept.
        kept_per_depth: what ``per_depth`` is, of what the requests themselves keep, see ``Scores.kept``; as long as no
            greedy request is among them, that is the same.
    """

    positions: int
    per_depth: tuple[float, ...]
    divergence: float
    overlaps: Tensor
    groups: Tensor
    weight: float
    stands_for: Tensor | None
    kept_per_depth: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Expected accepted tokens of a round that drafts a chain of all depths: sum_d prod_{i <= d} alpha_i."""
        return _accepted(self.per_depth)

    @property
    def acceptance(self) -> float:
        """Expected acceptance rate of that chain: accepted per drafted token."""
        return acceptance_rate(self.accepted, len(self.per_depth))

    @property
    def expected_length(self) -> float:
        """Expected acceptance length: tokens per round, the bonus token included."""
        return length_of(self.per_depth)

    @property
    def length_beside_recall(self) -> float:
        """What the requests themselves are given in a round, where recall drafts what it knows.

        At each depth its share of the positions is right already.
        """
        return length_of(1 - self.weight + self.weight * alpha for alpha in self.kept_per_depth)

    def summary(self) -> dict[str, Any]:
        """The figures as JSON, for manifests, events and logs."""
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
    """Tokens per round, the bonus token included, of chains accepted so often at each depth."""
    return mean_acceptance_length(_accepted(per_depth), rounds=1)


def _accepted(per_depth: Iterable[float]) -> float:
    return sum(accumulate(per_depth, mul))


def weighted_mean(values: Tensor, weights: Tensor | None) -> float:
    """The mean of values [N], each as often as its weight [N] says; once each without weights."""
    return float(values.mean() if weights is None else (values * weights).sum() / weights.sum())


class ExpectedAcceptance(Metric):
    """At each depth of a chain, the weighted mean over its positions of the probability that the chain rule accepts.

    For a token drawn from q it is sum_v min(p, q), one minus the total variation between p and q (Leviathan et al.,
    2023). A depth that no position reaches has 0. It is of this process alone: the other ranks of a trainer do not
    evaluate, and asking them would wait for ever.
    """

    full_state_update = False
    accepted: Tensor
    weights: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("accepted", torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weights", torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor, valid: Tensor, weight: Tensor) -> None:
        """Add positions: the probability at each depth, which depths a position has, and how much it counts.

        [positions, depth] the first two, and [positions] the last.
        """
        counts = valid * weight[:, None]
        self.accepted += (torch.where(valid, accepted, 0.0) * counts).sum(0)
        self.weights += counts.sum(0)

    def compute(self) -> Tensor:
        """The mean for each depth so far, [depth]."""
        return self.accepted / self.weights.clamp(min=1e-9)


class Evaluation:
    """Evaluates a drafter over a chain of tokens on the distributions that verification captured.

    Positions count by their weights, and by how many of the traffic they stand for. The same batches in the same order
    make figures that can be paired.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Begin with nothing; ``scorer`` is the drafter's."""
        self._scorer, self._depth = scorer, scorer.depth
        self._expected, self._kept = ExpectedAcceptance(self._depth), ExpectedAcceptance(self._depth)
        self._columns: defaultdict[str, list[Tensor]] = defaultdict(list)  # of all positions so far
        self._sampled = False
        self.positions = self.sequences = 0

    @torch.inference_mode()
    def add(self, batch: DistillBatch) -> Tensor:
        """Take in a batch; returns the mean of ``GateFigures.overlaps`` of each sequence that has positions.

        Where not all of the traffic was kept each is times the part of the heaviest record that it weighs.
        """
        scores = self._scorer.score(batch)
        valid = torch.stack([batch.rows_at(d) for d in range(self._depth)], 1).cpu()  # [N, depth]
        every = torch.ones(len(valid), dtype=torch.float64)
        weight = every if batch.weight is None else batch.weight
        stands_for = every if batch.stands_for is None else batch.stands_for
        self._sampled |= batch.stands_for is not None
        seen = valid[:, 0]  # a position that depth 0 cannot predict has nothing to show
        new = {"divergences": scores.divergence, "weights": weight, "stands_for": stands_for}
        new["groups"] = batch.sequence.cpu() + self.sequences
        new["overlaps"] = weight * torch.where(valid, scores.accepted, 0.0).sum(1) / valid.sum(1).clamp(min=1)
        for expected, each in ((self._expected, scores.accepted), (self._kept, scores.kept)):
            expected.update(each, valid, weight * stands_for)
        for name, values in new.items():
            self._columns[name].append(values[seen])
        overlaps, sequence = self._columns["overlaps"][-1], batch.sequence.cpu()[seen]
        self.sequences += len(batch.lengths)
        self.positions += len(overlaps)
        count = torch.bincount(sequence, minlength=len(batch.lengths))
        shown = overlaps if batch.stands_for is None else overlaps * stands_for[seen] / batch.heaviest
        return (torch.bincount(sequence, shown, minlength=len(count)) / count)[count > 0]

    def over(self, batches: Iterable[DistillBatch]) -> GateFigures:
        """The figures when all ``batches`` are taken in, too."""
        for batch in batches:
            self.add(batch)
        return self.figures()

    def figures(self) -> GateFigures:
        """The figures of all batches so far."""
        if not self._columns:
            nothing, none = (0.0,) * self._depth, torch.empty(0, dtype=torch.float64)
            return GateFigures(0, nothing, 0.0, none, none.long(), 1.0, None, nothing)
        columns = {name: torch.cat(parts) for name, parts in self._columns.items()}
        stands_for = columns["stands_for"] if self._sampled else None
        return GateFigures(
            positions=self.positions,
            per_depth=tuple(self._expected.compute().view(self._depth).tolist()),
            divergence=weighted_mean(columns["divergences"], stands_for) if self.positions else 0.0,
            overlaps=columns["overlaps"],
            groups=columns["groups"],
            weight=weighted_mean(columns["weights"], stands_for) if self.positions else 1.0,
            stands_for=stands_for,
            kept_per_depth=tuple(self._kept.compute().view(self._depth).tolist()),
        )


def evaluate(drafter: Trainable, batches: Iterable[DistillBatch], depth: int, divergence: str) -> GateFigures:
    """The figures of a drafter over all ``batches``; see ``Evaluation``."""
    return Evaluation(Scorer(drafter, depth, divergence)).over(batches)
