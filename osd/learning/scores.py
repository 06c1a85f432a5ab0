"""How well a drafter predicts each position of a micro-batch, computed once for each record."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.drafters.trainable import Trainable
from osd.learning import DIVERGENCES
from osd.learning.batch import DistillBatch, Record
from osd.learning.divergences import draft_index, overlap, places

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
        """See ``Scorer.score``."""
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
