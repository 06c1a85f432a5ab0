"""Target distributions at the positions of a micro-batch, after the target's tokens and after the drafter's tokens.

On-policy distillation (Agarwal et al., "On-Policy Distillation of Language Models", ICLR 2024, arXiv 2306.13649) trains
a student on its own outputs. Verification has computed the target after every draft token, accepted or not. So nothing
has to be sampled or scored again.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import REJECTED, Trace

_NEVER = -1_000_000  # position before any draft


class TopKTargets:
    """Distributions at N positions: up to K most probable ids, and the mass of all other ids."""

    def __init__(self, rows: int, kept: int) -> None:
        """Allocate ``rows`` positions with ``kept`` ids each; every position must be set with ``put``."""
        self._ids = np.empty((rows, kept), np.int64)
        self._logp = np.empty((rows, kept), np.float32)
        self._tail = np.empty(rows, np.float32)

    def put(self, rows: np.ndarray, ids: np.ndarray, logp: np.ndarray, tail: np.ndarray) -> None:
        """Set the positions ``rows`` [n] to ids and log-probabilities [n, k], k at most K, and log-masses [n]."""
        width = ids.shape[1]
        self._ids[rows, width:] = -1
        self._ids[rows, :width], self._logp[rows, :width], self._tail[rows] = ids, logp, tail

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids [N, K], -1 for none, log-probabilities [N, K] and the log-mass of other ids [N], both float32.

        They are renormalised together, because half precision changes their sum by up to 0.001.
        """
        logp = np.where(self._ids < 0, -np.inf, self._logp)
        total = np.logaddexp(np.logaddexp.reduce(logp, axis=1), self._tail)
        values = self._ids.copy(), logp - total[:, None], self._tail - total
        ids, logp, tail = map(torch.from_numpy, values)
        return ids, logp, tail


@dataclass
class OnPolicySamples:
    """Micro-batch with the drafter's own token at each rejected position, for steps on the drafter's outputs.

    Attributes:
        token_ids: [B, L] tokens of the batch, with the drafter's token at each rejected position.
        target_ids: [N, K] ids of the batch; directly after a rejected token the ids that the target predicts after it.
        target_logp: [N, K] log-probabilities, chosen in the same way.
        target_tail: [N] log-masses, chosen in the same way.
        distance: [N] number of positions since the last position directly after a rejected token, 0 at that position.
    """

    token_ids: Tensor
    target_ids: Tensor
    target_logp: Tensor
    target_tail: Tensor
    distance: Tensor

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors on a device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    def rows_at(self, depth: int) -> Tensor:
        """Return where the ``depth`` tokens before the position may be one draft, [N] bool.

        A draft does not continue after a rejected token.
        """
        return self.distance >= depth


def on_policy_samples(traces: list[Trace], token_ids: np.ndarray, target: TopKTargets) -> OnPolicySamples:
    """Return the on-policy samples of a batch.

    Args:
        traces: the traces of the batch; at least one has ``after_ids``.
        token_ids: [B, L] tokens of the batch.
        target: the distributions of the batch.
    """
    token_ids, target = token_ids.copy(), deepcopy(target)
    distances: list[np.ndarray] = []
    start = 0
    for row, trace in enumerate(traces):
        prompt, completion = trace.prompt_ids.shape[0], trace.completion_ids.shape[0]
        after = [array.numpy() for array in trace.after if array is not None]
        rejected = np.flatnonzero(trace.verdict.numpy() == REJECTED) if after else np.empty(0, np.int64)
        token_ids[row, prompt + rejected] = trace.drafted.numpy()[rejected]
        seen = rejected + 1 < completion
        behind = rejected[seen] + 1
        if after:
            target.put(start + behind, *(values[seen] for values in after))
        index = np.arange(completion)
        newest = np.concatenate([[_NEVER], behind])[np.searchsorted(behind, index)]
        distances.append(index - newest)
        start += completion
    return OnPolicySamples(torch.from_numpy(token_ids), *target.tensors(), torch.from_numpy(np.concatenate(distances)))
