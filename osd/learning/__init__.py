"""Learning a drafter from traces: batches, divergences, replay, the distiller, the gate, and drift of acceptance."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from osd.learning.divergences import (
    Overlap,
    acceptance,
    forward_kl,
    hybrid,
    jensen_shannon,
    lk_hybrid,
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
    "lk_hybrid": lk_hybrid,
}
"""What ``trainer.divergence`` may name."""
