"""Divergences between drafter and target, from the target's top-k log-probabilities and the log-mass of other ids.

All other ids (the tail) are one event. The target's mass of the tail was captured; the drafter's mass is one minus its
mass of the kept ids. A softmax over the top-k ids alone would ignore the tail and make the drafter too confident. When
k is the whole vocabulary, every divergence is exact.

A drafter with a small vocabulary gives no mass to other ids. Divergences that would become infinite there compare the
drafter with the target renormalised on the drafter's vocabulary, and weight the position by the target's mass on it.
All values and gradients are finite, even for distributions without common mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Log of zero; a true -inf would make gradients of sums NaN. exp() of it is exactly 0.
_LOG_ZERO = -1e9

# Target mass of zero before its log is taken; smaller than any probability in half precision.
_LEAST_MASS = 1e-30

_LK = 3.0
"""Decay of the weight of forward KL with acceptance, in the hybrid loss of arXiv 2602.23881."""


@dataclass(frozen=True)
class Overlap:
    """Probabilities of target and drafter for the same events at N positions.

    Attributes:
        p: [N, K] the target's mass of each kept id, 0 for ids outside the drafter's vocabulary.
        log_q: [N, K] the drafter's log-probability of each kept id.
        p_tail: [N] the target's mass of all other ids that the drafter can draft.
        log_q_tail: [N] the drafter's log-mass of all other ids.
        lost: [N] the target's mass of kept ids outside the drafter's vocabulary, and of the tail when the kept ids
            cover that vocabulary.
    """

    p: Tensor
    log_q: Tensor
    p_tail: Tensor
    log_q_tail: Tensor
    lost: Tensor

    def accepted(self) -> Tensor:
        """Return a lower bound of sum_v min(p, q), [N]: the unknown contribution of the tail counts as 0."""
        return torch.minimum(self.p, self.log_q.exp()).sum(-1)


Divergence = Callable[[Overlap], Tensor]


def overlap(
    logits: Tensor, target_ids: Tensor, target_logp: Tensor, target_tail: Tensor, index: Tensor | None
) -> Overlap:
    """Compute the overlap of drafter and captured target.

    Args:
        logits: [N, draft_vocab] logits of the drafter.
        target_ids: [N, K] kept ids of the target, -1 for none.
        target_logp: [N, K] their log-probabilities.
        target_tail: [N] log-mass of all other ids.
        index: the result of ``draft_index``.
    """
    log_q = logits.float().log_softmax(-1)  # [N, draft_vocab]
    size = log_q.shape[1]
    known = target_ids >= 0
    place = places(target_ids, index)  # [N, K]
    drafted = place >= 0
    mass = torch.where(known, target_logp.exp(), 0.0)
    p = torch.where(drafted, mass, 0.0)
    # An extra column collects the ids outside the draft vocabulary.
    kept = torch.zeros(len(log_q), size + 1, dtype=torch.bool, device=log_q.device)
    kept.scatter_(1, torch.where(drafted, place, size), True)
    log_q_tail = log_q.masked_fill(kept[:, :size], _LOG_ZERO).logsumexp(-1)
    covered = drafted.sum(-1) >= size
    tail = target_tail.exp()
    return Overlap(
        p=p,
        log_q=torch.where(drafted, log_q.gather(1, torch.where(drafted, place, 0)), _LOG_ZERO),
        p_tail=torch.where(covered, 0.0, tail),
        log_q_tail=log_q_tail,
        lost=(mass - p).sum(-1) + torch.where(covered, tail, 0.0),
    )


def draft_index(draft_ids: Tensor | None) -> Tensor | None:
    """Return the index in the draft vocabulary for each target id, -1 for none; the inverse of ``drafter.draft_ids``.

    Ids beyond the end of the result are not in the draft vocabulary either. The result is None for the full vocabulary.
    """
    if draft_ids is None:
        return None
    index = torch.full((int(draft_ids.max()) + 1,), -1, dtype=torch.int64, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def places(ids: Tensor, index: Tensor | None) -> Tensor:
    """Return the indices of target ids in the draft vocabulary, -1 for ids outside it and for ids of -1."""
    if index is None:
        return ids
    return torch.where((ids >= 0) & (ids < len(index)), index[ids.clamp(0, len(index) - 1)], -1)


def forward_kl(events: Overlap) -> Tensor:
    """Return KL(p || q) at each position in nats, [N]; zero only where the drafter equals the target on every event.

    The target is renormalised on the drafter's vocabulary, and the result is weighted by the target's mass there.
    EAGLE-3 (arXiv 2503.01840) masks positions whose best token cannot be drafted for the same reason. The tail counts
    as draftable.
    """
    p = torch.cat([events.p, events.p_tail[:, None]], 1)
    log_q = torch.cat([events.log_q, events.log_q_tail[:, None]], 1)
    mass = p.sum(-1, keepdim=True)
    positive = p > 0
    # mass * KL(p / mass || q) without a division by the mass.
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log() - mass.clamp(min=torch.finfo(p.dtype).tiny).log()
    return torch.where(positive, p * (log_p - log_q), 0.0).sum(-1)


def total_variation(events: Overlap) -> Tensor:
    """Return half the L1 distance of p and q at each position, [N]: one minus the expected acceptance.

    Mass outside the drafter's vocabulary counts as lost. The tail is compared as one event, so the value is a lower
    bound when k is below the vocabulary.
    """
    kept = (events.p - events.log_q.exp()).abs().sum(-1)
    return 0.5 * (kept + (events.p_tail - events.log_q_tail.exp()).abs() + events.lost)


def reverse_kl(events: Overlap) -> Tensor:
    """Return KL(q || p) at each position in nats, [N]; it penalises drafter mass where the target has none.

    The target is renormalised and weighted as in ``forward_kl``. A target mass below 1e-30 counts as 1e-30.
    """
    log_p, log_q, mass = _renormalised(events)
    return mass * (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(events: Overlap, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen-Shannon divergence at each position in nats, [N].

    It is beta KL(p || m) + (1 - beta) KL(q || m). The mixture is m = beta p + (1 - beta) q with 0 < beta < 1. A small
    beta acts like reverse KL, a large beta like forward KL. The target is renormalised and weighted as in
    ``forward_kl``. Source: GKD, arXiv 2306.13649.
    """
    log_p, log_q, mass = _renormalised(events)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    forward = (log_p.exp() * (log_p - log_m)).sum(-1)
    backward = (log_q.exp() * (log_q - log_m)).sum(-1)
    return mass * (beta * forward + (1 - beta) * backward)


def acceptance(events: Overlap) -> Tensor:
    """Return minus the log of the expected acceptance sum_v min(p, q) at each position, [N].

    The value is relative to the best acceptance that the drafter's vocabulary allows, and weighted by it. So zero is a
    drafter without avoidable loss. Unlike total variation it has a gradient where p and q share almost no mass. The
    tail counts as one event, so the value is a lower bound when k is below the vocabulary.
    """
    log_p, log_q, mass = _events(events)
    best = mass.clamp(min=_LEAST_MASS).log()
    return mass * (best - torch.minimum(log_p, log_q).logsumexp(-1))


def hybrid(events: Overlap) -> Tensor:
    """Return total variation plus forward KL at each position, [N].

    Total variation is one minus the acceptance, but has almost no gradient where the drafter is far off; forward KL has
    one there.
    """
    return total_variation(events) + forward_kl(events)


def lk_hybrid(events: Overlap) -> Tensor:
    """Return a mixture of forward KL and total variation at each position, [N].

    It moves from forward KL to total variation as acceptance grows. The value is ``w KL + (1 - w) TV`` with ``w =
    exp(-3 a)``, where a is the mean acceptance of these positions. Source: LK losses, arXiv 2602.23881.
    """
    variation = total_variation(events)
    draftable = events.p.sum(-1) > 0
    accepted = (1 - variation)[draftable].sum() / draftable.sum().clamp(min=1)
    weight = torch.exp(-_LK * accepted.detach())
    return weight * forward_kl(events) + (1 - weight) * variation


def _events(events: Overlap) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of target and drafter, [N, K + 1] each, and the target's mass, [N].

    The tail is the last event. Ids outside the drafter's vocabulary are left out.
    """
    p = torch.cat([events.p, events.p_tail[:, None]], 1)
    log_q = torch.cat([events.log_q, events.log_q_tail[:, None]], 1)
    return p.clamp(min=_LEAST_MASS).log(), log_q, p.sum(-1)


def _renormalised(events: Overlap) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of ``_events`` with the target scaled to a mass of one."""
    log_p, log_q, mass = _events(events)
    scaled = log_p - mass.clamp(min=_LEAST_MASS).log()[:, None]
    return scaled, log_q, mass


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "acceptance": acceptance,
    "hybrid": hybrid,
    "lk_hybrid": lk_hybrid,
}
"""Divergences by their name in ``trainer.divergence``."""
