"""Learning a drafter from traces: batches, divergences, replay, the distiller, the gate, and drift of acceptance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from osd.config import TrainerSettings
from osd.learning.divergences import (
    Overlap,
    acceptance,
    forward_kl,
    hybrid,
    jensen_shannon,
    reverse_kl,
    total_variation,
)

Divergence = Callable[[Overlap], Tensor]

DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "acceptance": acceptance,
    "hybrid": hybrid,
}
"""What ``trainer.divergence`` may name."""


def objective(settings: TrainerSettings) -> Divergence:
    """The divergence that training minimises. Evaluation takes ``DIVERGENCES``: its figures compare across betas."""
    if settings.divergence == "jensen_shannon":
        return partial(jensen_shannon, beta=settings.jensen_shannon_beta)
    return DIVERGENCES[settings.divergence]
