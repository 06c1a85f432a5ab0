"""Which drafted tokens a Falcon drafter is shown while it learns.

Coupled sequential glancing distillation (Gao et al., arXiv 2412.12639): where a first pass is wrong often, the second
is shown some of the answers, token and feature both, and learns the rest of their blocks. What is shown begins a block,
so that later tokens are learnt from earlier ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 0.4
"""Answers that are shown for each wrong token at first, as in the paper."""

_LAST_STEP = 1000
"""Micro-step from which on nothing is shown: a draft sees no answers either."""


def glance_ratio(step: int) -> float:
    """Answers that are shown for each wrong token in a micro-step, the first of which is 0; it falls linearly to 0."""
    return _FIRST * max(0.0, 1 - step / _LAST_STEP)


def glances(wrong: Tensor, usable: Tensor, ratio: float, step: int) -> Tensor:
    """How many answers each block is shown, [B, W] int64: of a block of k none to k - 1, the first ones.

    The blocks are drawn, keyed by the ``step``: training goes on from a version as if it had not stopped.

    Args:
        wrong: [B, W, k] where the first pass was.
        usable: [B, W] the blocks that count.
        ratio: of all answers that are shown to the wrong tokens.
        step: the micro-step.
    """
    shown = torch.zeros_like(usable, dtype=torch.int64)
    chosen = usable.nonzero()
    budget = int(ratio * int(wrong[usable].sum()))
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(len(chosen), generator=generator)
    counts = torch.randint(1, wrong.shape[-1], (len(chosen),), generator=generator)
    counts[counts.cumsum(0) > budget] = 0
    rows, columns = chosen[order.to(chosen.device)].T
    shown[rows, columns] = counts.to(shown.device)
    return shown
