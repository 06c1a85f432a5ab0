"""The log-probabilities that clients ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.engine.request import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """The log-probabilities of ``tokens`` [n] in the target's own distributions, before any sampling setting.

    ``logits`` [n, V] are those of their places; ``top`` of the most probable tokens are reported beside each.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    mine = (logits.gather(-1, chosen) - total).squeeze(-1).tolist()
    values, ids = logits.topk(min(top, logits.shape[-1]), -1)
    best = zip(ids.tolist(), (values - total).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(*pairs, strict=True)))
        for token, logprob, pairs in zip(tokens, mine, best, strict=True)
    ]
