"""What the target says at the positions of a micro-batch, after its own tokens and after the drafter's.

On-policy distillation (Agarwal et al., "On-Policy Distillation of Language Models", ICLR 2024, arXiv 2306.13649) trains
a student on what it writes itself. A verification has computed the target after every token of a draft, kept or not, so
that nothing has to be sampled or scored again.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import REJECTED, Trace

_NEVER = -1_000_000  # a place that is further away than any draft is long


class TopKTargets:
    """The most probable ids of N places, up to K each, and the mass of all others."""

    def __init__(self, rows: int, kept: int) -> None:
        """Make room for ``rows`` places with ``kept`` ids each; all of them must be put."""
        self._ids = np.empty((rows, kept), np.int64)
        self._logp = np.empty((rows, kept), np.float32)
        self._tail = np.empty(rows, np.float32)

    def put(self, rows: np.ndarray, ids: np.ndarray, logp: np.ndarray, tail: np.ndarray) -> None:
        """Set the places ``rows`` [n] to ids and log-probabilities [n, k], k at most K, and log-masses [n]."""
        width = ids.shape[1]
        self._ids[rows, width:] = -1
        self._ids[rows, :width], self._logp[rows, :width], self._tail[rows] = ids, logp, tail

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N, K], -1 for none, their log-probabilities [N, K] and the log-mass of the others [N], float32.

        They are renormalised together: half precision leaves them off by up to a thousandth.
        """
        logp = np.where(self._ids < 0, -np.inf, self._logp)
        total = np.logaddexp(np.logaddexp.reduce(logp, axis=1), self._tail)
        values = self._ids.copy(), logp - total[:, None], self._tail - total
        ids, logp, tail = map(torch.from_numpy, values)
        return ids, logp, tail


@dataclass
class OwnSamples:
    """A micro-batch with the drafter's own token wherever it was rejected, for the steps that read its outputs.

    Attributes:
        token_ids: [B, L] those of the batch, but for the rejected places.
        target_ids: [N, K] those of the batch, but right behind a rejected token what the target says after it.
        target_logp: [N, K] likewise.
        target_tail: [N] likewise.
        since: [N] how many places ago there was one right behind a rejected token, this one left out.
    """

    token_ids: Tensor
    target_ids: Tensor
    target_logp: Tensor
    target_tail: Tensor
    since: Tensor

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return type(self)(*(getattr(self, one.name).to(device) for one in fields(self)))

    def rows_at(self, depth: int) -> Tensor:
        """Where the ``depth`` tokens before the place could be a draft, [N] bool: nothing follows a rejected one."""
        return self.since >= depth


def own_samples(traces: list[Trace], token_ids: np.ndarray, target: TopKTargets) -> OwnSamples:
    """What ``traces``, one or more of them with ``after_ids``, know of the drafter's own tokens, over their batch."""
    token_ids, target = token_ids.copy(), deepcopy(target)
    since: list[np.ndarray] = []
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
        since.append(index - newest)
        start += completion
    return OwnSamples(torch.from_numpy(token_ids), *target.tensors(), torch.from_numpy(np.concatenate(since)))
