"""Learning a drafter from traces: batches, divergences, replay, the distiller and the gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from osd.learning.divergences import Overlap, forward_kl, total_variation

DIVERGENCES: dict[str, Callable[[Overlap], Tensor]] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
}
"""What ``trainer.divergence`` may name."""
