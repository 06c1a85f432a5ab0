"""How far a drafter is from the target, from the target's top-k log-probabilities and the log-mass of the rest.

The rest is one lumped event: the target's mass of it was captured, the drafter's is one minus its mass of the kept ids.
A softmax over the top-k alone would forget that event and pull the drafter towards distributions that are too sharp.
With k the whole vocabulary every divergence is exact.

A drafter with a small vocabulary cannot draft the other ids: its mass there is zero. The divergences that a missing id
would make infinite compare the drafter with the target renormalised on its vocabulary, and weigh the place by the
target's mass there. All values and gradients are finite, for distributions without any common mass too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Stands for the log of zero where a true -inf would make the gradient of a sum NaN; exp() of it is exactly 0.
_LOG_ZERO = -1e9

# Stands for a target mass of zero where its log is taken: below every probability that half precision can hold.
_LEAST_MASS = 1e-30

_LK = 3.0
"""How fast the hybrid of arXiv 2602.23881 goes from forward KL to total variation as acceptance grows."""


@dataclass(frozen=True)
class Overlap:
    """Target and drafter over the same events, as probabilities of N places.

    Attributes:
        p: [N, K] the target's mass of each kept id, 0 where the drafter's vocabulary lacks the id.
        log_q: [N, K] the drafter's log-probability of it.
        p_tail: [N] the target's mass of all other ids that the drafter could draft.
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
        """A lower bound of sum_v min(p, q), [N]: what the tail adds is unknown and counts as 0."""
        return torch.minimum(self.p, self.log_q.exp()).sum(-1)


Divergence = Callable[[Overlap], Tensor]


def overlap(
    logits: Tensor, target_ids: Tensor, target_logp: Tensor, target_tail: Tensor, index: Tensor | None
) -> Overlap:
    """Line the drafter up with what was kept of the target.

    ``logits`` [N, draft_vocab] are the drafter's; ``target_ids`` and ``target_logp`` [N, K] what was kept, -1 for none,
    and ``target_tail`` [N] the log-mass of all other ids; ``index`` is that of ``draft_index``.
    """
    log_q = logits.float().log_softmax(-1)  # [N, draft_vocab]
    size = log_q.shape[1]
    known = target_ids >= 0
    place = places(target_ids, index)  # [N, K]
    drafted = place >= 0
    mass = torch.where(known, target_logp.exp(), 0.0)
    p = torch.where(drafted, mass, 0.0)
    # One more column takes the ids that the drafter lacks.
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
    """Invert ``drafter.draft_ids``: for each target id its place in the draft vocabulary, -1 for none.

    Ids beyond the end are in no draft vocabulary either.
    """
    if draft_ids is None:
        return None
    index = torch.full((int(draft_ids.max()) + 1,), -1, dtype=torch.int64, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def places(ids: Tensor, index: Tensor | None) -> Tensor:
    """Where in a draft vocabulary target ``ids`` are, -1 for nowhere; ids of -1 are none."""
    if index is None:
        return ids
    return torch.where((ids >= 0) & (ids < len(index)), index[ids.clamp(0, len(index) - 1)], -1)


def forward_kl(events: Overlap) -> Tensor:
    """KL(p || q) of each place in nats, [N]; zero only where the drafter equals the target on every event.

    The target is renormalised on the drafter's vocabulary and the result is weighted by the target's mass there, as
    EAGLE-3 (arXiv 2503.01840) masks places whose best token cannot be drafted. Mass of the tail counts as draftable.
    """
    p = torch.cat([events.p, events.p_tail[:, None]], 1)
    log_q = torch.cat([events.log_q, events.log_q_tail[:, None]], 1)
    mass = p.sum(-1, keepdim=True)
    positive = p > 0
    # mass * KL(p / mass || q) without dividing by it.
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log() - mass.clamp(min=torch.finfo(p.dtype).tiny).log()
    return torch.where(positive, p * (log_p - log_q), 0.0).sum(-1)


def total_variation(events: Overlap) -> Tensor:
    """Half the L1 distance of p and q at each place, [N]; one minus the expected acceptance.

    Mass that the drafter cannot draft counts as lost. The tail is compared as one event, so with k below the
    vocabulary this is a lower bound.
    """
    kept = (events.p - events.log_q.exp()).abs().sum(-1)
    return 0.5 * (kept + (events.p_tail - events.log_q_tail.exp()).abs() + events.lost)


def reverse_kl(events: Overlap) -> Tensor:
    """KL(q || p) of each place in nats, [N]: punishes a drafter for mass where the target has none.

    Renormalised and weighted as ``forward_kl``. A target mass below 1e-30 counts as 1e-30.
    """
    log_p, log_q, mass = _renormalised(events)
    return mass * (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(events: Overlap, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence of each place in nats, [N]: beta KL(p || m) + (1 - beta) KL(q || m).

    With m = beta p + (1 - beta) q and 0 < beta < 1; small beta weighs as reverse KL does, large beta as forward KL.
    Renormalised and weighted as ``forward_kl``. GKD, arXiv 2306.13649.
    """
    log_p, log_q, mass = _renormalised(events)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    forward = (log_p.exp() * (log_p - log_m)).sum(-1)
    backward = (log_q.exp() * (log_q - log_m)).sum(-1)
    return mass * (beta * forward + (1 - beta) * backward)


def acceptance(events: Overlap) -> Tensor:
    """Minus the log of the expected acceptance sum_v min(p, q) of each place, [N]: trains what decoding measures.

    Taken relative to the best that the drafter's vocabulary allows, and weighted by it, so that zero is a drafter
    that loses nothing it could have. Unlike total variation it has a gradient where p and q share almost no mass. The
    tail counts as one event, so with k below the vocabulary this is a lower bound.
    """
    log_p, log_q, mass = _events(events)
    best = mass.clamp(min=_LEAST_MASS).log()
    return mass * (best - torch.minimum(log_p, log_q).logsumexp(-1))


def hybrid(events: Overlap) -> Tensor:
    """Total variation plus forward KL of each place, [N].

    The first is one minus the acceptance, but flat where the drafter knows nothing yet; the second leads it there.
    """
    return total_variation(events) + forward_kl(events)


def lk_hybrid(events: Overlap) -> Tensor:
    """Forward KL first and total variation later, as acceptance grows, of each place, [N].

    ``w KL + (1 - w) TV`` with ``w = exp(-3 a)``, a the mean acceptance of these places. LK losses, arXiv 2602.23881.
    """
    apart = total_variation(events)
    draftable = events.p.sum(-1) > 0
    accepted = (1 - apart)[draftable].sum() / draftable.sum().clamp(min=1)
    weight = torch.exp(-_LK * accepted.detach())
    return weight * forward_kl(events) + (1 - weight) * apart


def _events(events: Overlap) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of target and drafter with the tail last, [N, K + 1] each, and the target's mass of them, [N].

    What the drafter cannot draft is in none of them.
    """
    p = torch.cat([events.p, events.p_tail[:, None]], 1)
    log_q = torch.cat([events.log_q, events.log_q_tail[:, None]], 1)
    return p.clamp(min=_LEAST_MASS).log(), log_q, p.sum(-1)


def _renormalised(events: Overlap) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the target scaled to a mass of one."""
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
"""What ``trainer.divergence`` may name."""
