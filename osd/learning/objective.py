"""Objective of a micro-step: divergence, positions, unrolled depth, and tokens that unrolled steps read."""

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
from osd.learning.block_starts import block_starts
from osd.learning.divergences import DIVERGENCES, Divergence, draft_index, jensen_shannon, overlap, places
from osd.learning.targets import OnPolicySamples

_DECAY = 0.8
"""Factor of the weight of each further unrolled step, as in EAGLE-3 (arXiv 2503.01840)."""

_MAX_RATE = 0.95
"""Upper limit of the acceptance rate assumed for depths without data."""

_USUAL_DEPTH, _DEEP_INTERVAL = 2, 4
"""Unrolled steps of most micro-steps, and interval of the micro-steps that unroll ``trainer.unroll`` steps."""


@dataclass(frozen=True)
class DistillationObjective:
    """Loss of one micro-step: a weighted sum over depths of the mean divergence over positions.

    Every fourth micro-step unrolls ``trainer.unroll`` steps, the others at most two. A drafter that was never unrolled
    to its draft depth is confident and wrong there. But most of the effect of training at two depths carries over to
    further depths, and each depth costs as much as the first.

    After the first step the drafter reads the target's tokens. With ``trainer.samples`` it reads its own token where
    that was rejected and the trace has the target's distribution after it; "mixed" alternates between both.

    Attributes:
        settings: the settings of training.
        depth: the number of steps to unroll.
        on_policy: whether later steps read the drafter's own tokens.
        kept: recent acceptance rates by depth, of the depths with data.
        step: the number of the micro-step.
    """

    settings: TrainerSettings
    depth: int
    on_policy: bool
    kept: Sequence[float] = ()
    step: int = 0

    @classmethod
    def of(cls, settings: TrainerSettings, step: int, kept: Sequence[float] = ()) -> DistillationObjective:
        """Return the objective of micro-step ``step``, which determines the depth and the tokens of later steps."""
        depth = settings.unroll if step % _DEEP_INTERVAL == 0 else min(settings.unroll, _USUAL_DEPTH)
        turn = step // _DEEP_INTERVAL + step  # alternates among the deep micro-steps too
        on_policy = settings.samples == "student" or (settings.samples == "mixed" and turn % 2 == 1)
        return cls(settings, depth, on_policy, kept, step)

    def share(self, depth: int) -> float:
        """Return the weight of the loss at a depth; the first depth has weight 1."""
        return _SHARES[self.settings.depths](depth, self.kept)

    def drafted(self, batch: Batch) -> Tensor | None:
        """Return drafted target ids [B, L]; unrolled steps after the first read them in place of ``batch.token_ids``.

        None if these steps read ``batch.token_ids`` too.
        """
        samples = self._samples(batch)
        return None if samples is None else samples.token_ids

    def sampled(self, batch: Batch, draft_ids: Tensor) -> SampledVocabulary | None:
        """Return the ids that the target names in this micro-batch, with ``trainer.negatives`` sampled other ids."""
        batch, samples = cast(DistillBatch, batch), self._samples(batch)
        target_ids = [batch.target_ids] if samples is None else [batch.target_ids, samples.target_ids]
        named = places(torch.cat([ids.flatten() for ids in target_ids]), draft_index(draft_ids))
        return sampled(named, len(draft_ids), self.settings.negatives, self.step)

    def block_starts(self, batch: Batch, most: int) -> Tensor:
        """Return the places [B, W] of the tokens before the blocks to learn; see ``osd.learning.block_starts``."""
        return block_starts(cast(DistillBatch, batch), most, self.step)

    def loss(
        self,
        batch: Batch,
        levels: Sequence[Tensor],
        draft_ids: Tensor | None,
        left_out: Sequence[Tensor] | None = None,
    ) -> Loss:
        """Return the loss of a micro-batch.

        Args:
            batch: the micro-batch.
            levels: logits [N, draft vocabulary] of each unrolled step.
            draft_ids: target ids of the draft vocabulary, None for the full vocabulary.
            left_out: see ``mean``, for each step.
        """
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
            # A drafter without hidden states returns the same logits for every depth.
            if logits is not before:
                target: DistillBatch | OnPolicySamples = batch if samples is None or not depth else samples
                events = overlap(logits, target.target_ids, target.target_logp, target.target_tail, index)
                values, accepted, before = divergence(events), events.accepted().detach(), logits
            kept.append(float(accepted[rows].mean()))
            loss = loss + self.mean(batch, depth, values, off)
        return Loss(loss, int(weights.count_nonzero()), kept)

    def mean(self, batch: Batch, depth: int, values: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the weighted mean of a step's values over the positions of its depth, times the depth's weight.

        Args:
            batch: the micro-batch.
            depth: the depth of the step.
            values: [N] value of each position.
            left_out: [N] bool, positions that do not count.

        Returns:
            A scalar; constant 0 if no position remains.
        """
        batch = cast(DistillBatch, batch)
        rows = self._rows(batch, depth, left_out)
        if not rows.any():
            return torch.zeros((), device=values.device)
        weights = weigh(batch, self.settings)[rows]
        return self.share(depth) * (values[rows] * weights / weights.mean()).mean()

    def surprise(self, batch: Batch, logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        """Return minus the log-probability of the target's best token, [N]; 0 where it cannot be drafted."""
        batch, index = cast(DistillBatch, batch), draft_index(draft_ids)
        best = batch.target_ids.gather(1, batch.target_logp.argmax(-1, keepdim=True)).squeeze(-1)
        best = places(best, index)
        return cross_entropy(logits, best, ignore_index=-1, reduction="none")

    def _rows(self, batch: DistillBatch, depth: int, left_out: Tensor | None) -> Tensor:
        """Return the positions that count at a depth, [N] bool."""
        rows, samples = batch.rows_at(depth) & (weigh(batch, self.settings) > 0), self._samples(batch)
        if samples is not None and depth:
            rows = rows & samples.rows_at(depth)
        return rows if left_out is None else rows & ~left_out

    def _samples(self, batch: Batch) -> OnPolicySamples | None:
        return cast(DistillBatch, batch).on_policy if self.on_policy else None


def _decayed(depth: int, kept: Sequence[float]) -> float:
    """Return 0.8^depth."""
    return _DECAY**depth


def _by_length(depth: int, kept: Sequence[float]) -> float:
    """Return the effect of the log-acceptance at a depth on the expected accepted length, relative to the first depth.

    With A_m the probability that a draft is accepted down to depth m, it is ``sum_{m >= depth} A_m / sum_{m >= 0}
    A_m``. Depths without data get the acceptance of the last depth with data. Source: D-PACE, arXiv 2605.18810.
    """
    rates = [*kept, *(min(kept[-1] if kept else _DECAY, _MAX_RATE) for _ in range(depth + 1 - len(kept)))]
    last = min(rates[-1], _MAX_RATE)
    chances = list(accumulate(rates, mul))
    further = chances[-1] * last / (1 - last)
    total = sum(chances) + further
    return (sum(chances[depth:]) + further) / total if total else float(not depth)


_SHARES: dict[str, Callable[[int, Sequence[float]], float]] = {"decay": _decayed, "length": _by_length}
"""Weights of depths by their name in ``trainer.depths``."""


def divergence_of(settings: TrainerSettings) -> Divergence:
    """Return the divergence to minimise; evaluation uses ``DIVERGENCES``, so that its figures do not depend on beta."""
    if settings.divergence == "jensen_shannon":
        return partial(jensen_shannon, beta=settings.jensen_shannon_beta)
    return DIVERGENCES[settings.divergence]


def weigh(batch: DistillBatch, settings: TrainerSettings) -> Tensor:
    """Return the weight of each position, [N] float32, according to ``trainer.positions``.

    ``all``: every position has weight 1. ``rejected``: only rejected positions count. ``weighted``: rejected positions
    have ``trainer.rejected_weight``, all others 1. A rejected position is the one where the distributions disagreed:
    the position of the token by which the target replaced the drafted one. The bonus token after a fully accepted draft
    was not drafted and is not a rejected position.
    """
    ones = torch.ones_like(batch.target_tail)
    rejected = batch.verdict == REJECTED
    if settings.positions == "rejected":
        return torch.where(rejected, ones, 0.0)
    if settings.positions == "weighted":
        return torch.where(rejected, settings.rejected_weight, ones)
    return ones


def sampled(named: Tensor, vocabulary: int, negatives: int, step: int) -> SampledVocabulary | None:
    """Choose the rows of a drafter's head for one micro-batch: the target's ids, and a sample of other ids.

    This is a softmax over a sampled vocabulary (Jean et al. 2015, arXiv 1412.2007). Only the total mass of unnamed ids
    matters, so a uniform sample represents them all. The logit of each sampled id is raised by the log of the number of
    ids that it represents (Bengio and Senecal 2008). So the sum of exponentials is unbiased.

    Args:
        named: [n] indices in the draft vocabulary, -1 for none.
        vocabulary: size of the draft vocabulary.
        negatives: number of other ids to sample.
        step: number of the micro-step, the seed of the sample.

    Returns:
        The chosen ids, or None for the whole vocabulary: when ``negatives`` is 0 or the sample would be more than half
            of the unnamed ids.
    """
    is_unnamed = torch.ones(vocabulary, dtype=torch.bool, device=named.device)
    is_unnamed[named[named >= 0]] = False
    unnamed = is_unnamed.nonzero().squeeze(-1)
    if not negatives or 2 * negatives > len(unnamed):
        return None
    # The seed makes training after a checkpoint equal to training without interruption.
    order = torch.randperm(len(unnamed), generator=torch.Generator().manual_seed(step))[:negatives]
    chosen = unnamed[order.to(unnamed.device)]
    named = (~is_unnamed).nonzero().squeeze(-1)
    raised = torch.zeros(len(named) + negatives, device=named.device)
    raised[len(named) :] = math.log(len(unnamed) / negatives)
    return SampledVocabulary(torch.cat([named, chosen]), raised)
