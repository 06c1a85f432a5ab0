"""The target's distributions at the places of a micro-batch, as far as traces keep them."""

from __future__ import annotations

from copy import deepcopy
from typing import Self

import numpy as np
import torch
from torch import Tensor


class Kept:
    """The most probable ids of N places, up to K each, and the mass of all others."""

    def __init__(self, rows: int, kept: int) -> None:
        """Make room for ``rows`` places with ``kept`` ids each; all of them must be put."""
        self._ids = np.full((rows, kept), -1, np.int64)
        self._logp = np.full((rows, kept), -np.inf, np.float32)
        self._tail = np.empty(rows, np.float32)

    def copy(self) -> Self:
        """The same, to be changed."""
        return deepcopy(self)

    def put(self, rows: np.ndarray, ids: np.ndarray, logp: np.ndarray, tail: np.ndarray) -> None:
        """Set the places ``rows`` [n] to ids and log-probabilities [n, k], k at most K, and log-masses [n]."""
        width = ids.shape[1]
        self._ids[rows, width:] = -1
        self._ids[rows, :width], self._logp[rows, :width], self._tail[rows] = ids, logp, tail

    def tensors(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N, K], -1 for none, their log-probabilities [N, K] and the log-mass of the others [N], float32.

        They are renormalised together: half precision leaves them off by up to a thousandth.
        """
        logp = np.where(self._ids < 0, -np.inf, self._logp)
        total = np.logaddexp(np.logaddexp.reduce(logp, axis=1), self._tail)
        return (
            torch.from_numpy(self._ids.copy()).to(device),
            torch.from_numpy(logp - total[:, None]).to(device),
            torch.from_numpy(self._tail - total).to(device),
        )
