"""Choice of the blocks of a micro-batch, for drafters that learn whole blocks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.capture.trace import REJECTED
from osd.learning.batch import DistillBatch
from osd.verification.tree import repeats


def block_starts(batch: DistillBatch, most: int, step: int) -> Tensor:
    """Return the sorted places [B, W] of the tokens before at most ``most`` blocks to learn.

    The blocks that begin with a rejected position come first, because the drafter was wrong there. Random blocks fill
    the rest. The start of a block is at least at place 1, so that it has a context. A sequence with fewer than W blocks
    repeats its last place, after which no block exists.

    Args:
        batch: the micro-batch.
        most: the maximum number of blocks.
        step: the number of the micro-step, the seed of the random blocks.
    """
    count, length = batch.token_ids.shape
    positions = (batch.place > 1).nonzero().squeeze(-1)
    # The seed makes training after a checkpoint equal to training without interruption.
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(step))
    shuffled = positions[order.to(positions.device)]
    accepted = (batch.verdict[shuffled] != REJECTED).int()
    chosen = shuffled[accepted.argsort(stable=True)[:most]]
    rows, starts = batch.sequence[chosen], batch.place[chosen] - 1
    sorted_order = (rows * length + starts).argsort()
    rows, starts = rows[sorted_order], starts[sorted_order]
    column = repeats(rows)
    width = 1 + int(column.max()) if len(column) else 1
    return starts.new_full((count, width), length - 1).index_put((rows, column), starts)
