"""What a micro-step minimises: which divergence, at which positions, how far unrolled, and over whose tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from osd.capture.trace import REJECTED
from osd.config import TrainerSettings
from osd.drafting.trainable import Batch, Loss, SampledVocabulary
from osd.learning.batch import DistillBatch
from osd.learning.divergences import DIVERGENCES, Divergence, draft_index, jensen_shannon, overlap, places
from osd.learning.targets import OwnSamples

_DECAY = 0.8
"""Weight of each further unrolled step, as in EAGLE-3 (arXiv 2503.01840)."""

_SURE = 0.95
"""Acceptance that drafts are taken to have at most beyond the depths that were seen."""

_USUAL_DEPTH, _WHOLE_EVERY = 2, 4
"""Steps that most micro-steps unroll at most, and which of them go all the way."""


@dataclass(frozen=True)
class Objective:
    """The loss of one micro-step: the mean divergence of the positions that exist at each depth, weighed and added.

    Every fourth micro-step unrolls ``trainer.unroll`` steps, the others two at most: a drafter that was never unrolled
    as far as it drafts is confident and wrong there, yet what it learns at two depths carries over to the next ones,
    and each step costs as much as the first. Behind the first step the drafter reads the target's tokens or, as
    ``trainer.samples`` says, its ``own`` where it was rejected and the batch knows them: "mixed" takes turns.

    ``kept`` is the acceptance of each depth lately, as far as it is known; ``step`` the micro-step's number.
    """

    settings: TrainerSettings
    depth: int
    own: bool
    kept: Sequence[float] = ()
    step: int = 0

    @classmethod
    def of(cls, settings: TrainerSettings, step: int, kept: Sequence[float] = ()) -> Objective:
        """That of the ``step``-th micro-step."""
        depth = settings.unroll if step % _WHOLE_EVERY == 0 else min(settings.unroll, _USUAL_DEPTH)
        turn = step // _WHOLE_EVERY + step  # so that whole ones are read both ways
        own = settings.samples == "student" or (settings.samples == "mixed" and turn % 2 == 1)
        return cls(settings, depth, own, kept, step)

    def share(self, depth: int) -> float:
        """How much the loss of a ``depth`` counts, 1 of the first."""
        return _SHARES[self.settings.depths](depth, self.kept)

    def drafted(self, batch: Batch) -> Tensor | None:
        """[B, L] the tokens that later steps read, None for the batch's own."""
        samples = self._samples(batch)
        return None if samples is None else samples.token_ids

    def sampled(self, batch: Batch, draft_ids: Tensor) -> SampledVocabulary | None:
        """The ids that the target names in this micro-batch, and ``trainer.negatives`` others of the vocabulary."""
        batch, samples = cast(DistillBatch, batch), self._samples(batch)
        said = [batch.target_ids] if samples is None else [batch.target_ids, samples.target_ids]
        named = places(torch.cat([ids.flatten() for ids in said]), draft_index(draft_ids))
        return sampled(named, len(draft_ids), self.settings.negatives, self.step)

    def loss(
        self,
        batch: Batch,
        levels: Sequence[Tensor],
        draft_ids: Tensor | None,
        left_out: Sequence[Tensor] | None = None,
    ) -> Loss:
        """The loss of the logits [N, draft vocabulary] of all unrolled steps; see ``mean`` for ``left_out``."""
        batch = cast(DistillBatch, batch)
        weights, samples = weigh(batch, self.settings), self._samples(batch)
        divergence, index = divergence_of(self.settings), draft_index(draft_ids)
        loss = torch.zeros((), device=batch.target_logp.device)
        values, accepted, before = loss, loss, None
        kept: list[float] = []
        for depth, logits in enumerate(levels):
            off = None if left_out is None else left_out[depth]
            rows = self._rows(batch, depth, off)
            if not rows.any():
                kept.append(math.nan)
                continue
            # A drafter that reads no hidden states predicts the same at every depth.
            if logits is not before:
                said: DistillBatch | OwnSamples = batch if samples is None or not depth else samples
                events = overlap(logits, said.target_ids, said.target_logp, said.target_tail, index)
                values, accepted, before = divergence(events), events.accepted().detach(), logits
            kept.append(float(accepted[rows].mean()))
            loss = loss + self.mean(batch, depth, values, off)
        return Loss(loss, int(weights.count_nonzero()), kept)

    def mean(self, batch: Batch, depth: int, values: Tensor, left_out: Tensor | None = None) -> Tensor:
        """The weighted mean of ``values`` [N] of one step times its share, over the positions that exist there.

        Those ``left_out`` [N] do not count. A constant 0 where none is left.
        """
        batch = cast(DistillBatch, batch)
        rows = self._rows(batch, depth, left_out)
        if not rows.any():
            return torch.zeros((), device=values.device)
        weights = weigh(batch, self.settings)[rows]
        return self.share(depth) * (values[rows] * weights / weights.mean()).mean()

    def surprise(self, batch: Batch, logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        """[N] minus the log-probability of the target's most probable token; 0 where it cannot be drafted."""
        batch, index = cast(DistillBatch, batch), draft_index(draft_ids)
        best = batch.target_ids.gather(1, batch.target_logp.argmax(-1, keepdim=True)).squeeze(-1)
        best = places(best, index)
        return cross_entropy(logits, best, ignore_index=-1, reduction="none")

    def _rows(self, batch: DistillBatch, depth: int, left_out: Tensor | None) -> Tensor:
        """[N] the positions that count at one step."""
        rows, samples = batch.rows_at(depth) & (weigh(batch, self.settings) > 0), self._samples(batch)
        if samples is not None and depth:
            rows = rows & samples.rows_at(depth)
        return rows if left_out is None else rows & ~left_out

    def _samples(self, batch: Batch) -> OwnSamples | None:
        return cast(DistillBatch, batch).own if self.own else None


def _decayed(depth: int, kept: Sequence[float]) -> float:
    """0.8^depth."""
    return _DECAY**depth


def _by_length(depth: int, kept: Sequence[float]) -> float:
    """What the log-acceptance at one depth adds to the expected accepted length, by what that of the first adds.

    With A_m the chance that a draft is kept down to depth m it is ``sum_{m >= depth} A_m / sum_{m >= 0} A_m``. Depths
    that were not seen are taken to be accepted like the last one that was. D-PACE, arXiv 2605.18810.
    """
    rates = [*kept, *(min(kept[-1] if kept else _DECAY, _SURE) for _ in range(depth + 1 - len(kept)))]
    last = min(rates[-1], _SURE)
    chances = list(accumulate(rates, mul))
    further = chances[-1] * last / (1 - last)
    total = sum(chances) + further
    return (sum(chances[depth:]) + further) / total if total else float(not depth)


_SHARES: dict[str, Callable[[int, Sequence[float]], float]] = {"decay": _decayed, "length": _by_length}
"""What ``trainer.depths`` may name."""


def divergence_of(settings: TrainerSettings) -> Divergence:
    """The divergence that training minimises. Evaluation takes ``DIVERGENCES``: its figures compare across betas."""
    if settings.divergence == "jensen_shannon":
        return partial(jensen_shannon, beta=settings.jensen_shannon_beta)
    return DIVERGENCES[settings.divergence]


def weigh(batch: DistillBatch, settings: TrainerSettings) -> Tensor:
    """The weight of each position, [N] float32, as ``trainer.positions`` says.

    ``all`` weighs every position 1; ``rejected`` only those where a draft token was rejected; ``weighted`` gives these
    ``trainer.rejected_weight`` and all others 1. A rejected position is the one whose distributions disagreed: the
    place of the token that the target put in the drafted one's stead, and not the place after it. The bonus token of
    a round that was accepted whole was never drafted, and is not among them.
    """
    ones = torch.ones_like(batch.target_tail)
    rejected = batch.verdict == REJECTED
    if settings.positions == "rejected":
        return torch.where(rejected, ones, 0.0)
    if settings.positions == "weighted":
        return torch.where(rejected, settings.rejected_weight, ones)
    return ones


def sampled(named: Tensor, vocabulary: int, negatives: int, step: int) -> SampledVocabulary | None:
    """Choose the rows of a drafter's head that one micro-batch reads: those that the target names, and some others.

    A softmax over a sample of the vocabulary (Jean et al. 2015, arXiv 1412.2007): ids that are not named differ only in
    how much of the mass they take together, so that a uniform sample of them stands for all, each with its logit raised
    by the log of how many it stands for (Bengio and Senecal 2008). The sum of exponentials is right on average.

    Args:
        named: [n] places in the draft vocabulary, -1 for none.
        vocabulary: its size.
        negatives: how many other places are chosen.
        step: the micro-step's number, which the choice is keyed by.

    Returns None where the sample would be almost all of the vocabulary, and where ``negatives`` is 0.
    """
    others = torch.ones(vocabulary, dtype=torch.bool, device=named.device)
    others[named[named >= 0]] = False
    unnamed = others.nonzero().squeeze(-1)
    if not negatives or 2 * negatives > len(unnamed):
        return None
    # Keyed, so that training goes on from a checkpoint as if it had not stopped.
    order = torch.randperm(len(unnamed), generator=torch.Generator().manual_seed(step))[:negatives]
    chosen = unnamed[order.to(unnamed.device)]
    mine = (~others).nonzero().squeeze(-1)
    raised = torch.zeros(len(mine) + negatives, device=named.device)
    raised[len(mine) :] = math.log(len(unnamed) / negatives)
    return SampledVocabulary(torch.cat([mine, chosen]), raised)
