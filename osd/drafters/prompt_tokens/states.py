"""What an acceptance head reads of prompt tokens, which have no layers: how sure the target was where one stood."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDTH = 32


def width_of(vocabulary: int) -> int:
    """Numbers of a state, where there are so many tokens."""
    return 1 + min(_WIDTH - 1, vocabulary)


def states_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """States [M, width] of ``tokens`` [M] that were drawn by ``logits`` [M, vocabulary].

    The log-probability of the token, and behind it the largest ones of all, in falling order.
    """
    logp = logits.float().log_softmax(-1)
    return torch.cat([logp.gather(-1, tokens[:, None]), logp.topk(width_of(logits.shape[-1]) - 1).values], -1)
