"""Distributions of the target in a decoding step, for the verification rules."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from osd.runtime.memory import recycled
from osd.verification.sampling import SamplingBatch


class Distributions(Protocol):
    """Interface of p [B, N + 1, V] in float32 or float64; a tensor has it too.

    Entry 0 is the distribution after the root, entry 1 + i after node i.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """Return whole rows for (sequences, entries), or single numbers for (sequences, entries, tokens)."""
        ...


class Probabilities:
    """Distributions computed from the target's logits.

    A CPU computes a row at its first use, because rules rarely read past the first rejection. A softmax over the
    vocabulary is the most expensive part of a decoding step after the forwards. Other devices compute all rows at once,
    because the host would have to wait for the device to know which rows are missing.
    """

    def __init__(self, logits: Tensor, owners: Tensor, places: Tensor, sampling: SamplingBatch) -> None:
        """Prepare the distributions of ``logits``.

        Args:
            logits: [R, V] with penalties and bias, in float32 or float64.
            owners: [R], index in ``sampling`` of the sequence of each row.
            places: [B, N + 1], the rows after the root and after each node; any row for padding.
            sampling: settings of the sequences.
        """
        lazy = logits.device.type == "cpu"
        self._rows = _LazyRows(logits, owners, sampling) if lazy else sampling.probabilities(logits, owners)
        self._places = places
        self.dtype, self.device = self._rows.dtype, logits.device
        self.shape = torch.Size((*places.shape, logits.shape[-1]))

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """Return whole rows for (sequences, entries), or single numbers for (sequences, entries, tokens)."""
        sequences, entries, *tokens = index
        return self._rows[(self._places[sequences, entries], *tokens)]

    def select(self, sequences: Tensor) -> Probabilities:
        """Return the distributions of some ``sequences`` [M]; all selections share the computed rows."""
        chosen = copy.copy(self)
        chosen._places = self._places[sequences]
        chosen.shape = torch.Size((len(sequences), *self.shape[1:]))
        return chosen


class _LazyRows:
    """Rows [R, V] of probabilities, each computed at its first use."""

    def __init__(self, logits: Tensor, owners: Tensor, sampling: SamplingBatch) -> None:
        self._logits, self._owners, self._sampling = logits, owners, sampling
        self.dtype = logits.dtype
        self._made = recycled(tuple(logits.shape), self.dtype, logits.device)
        self._used = 0
        self._where = torch.full((len(logits),), -1, device=logits.device)  # [R] index in ``_made``, -1 for none

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        rows, *tokens = index
        where = self._where[rows]
        if bool((where < 0).any()):
            self._make(rows[where < 0].unique())
            where = self._where[rows]
        return self._made[(where, *tokens)]

    def _make(self, rows: Tensor) -> None:
        begin, self._used = self._used, self._used + len(rows)
        first, last = int(rows[0]), int(rows[-1])
        neighbours = last - first == len(rows) - 1  # the rows ascend; a slice avoids a copy
        made = self._made[begin : self._used]  # also holds the copy of the logits: new memory costs more than a softmax
        logits = self._logits[first : last + 1] if neighbours else torch.index_select(self._logits, 0, rows, out=made)
        self._sampling.probabilities(logits, self._owners[rows], out=made)
        self._where[rows] = torch.arange(begin, self._used, device=rows.device)
