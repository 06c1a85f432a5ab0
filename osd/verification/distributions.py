"""Distributions of the target in one decoding step, as verification rules read them."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from osd.runtime.memory import recycled
from osd.verification.sampling import SamplingBatch


class Distributions(Protocol):
    """p [B, N + 1, V] of B sequences in float32 or float64, entry 0 after the root and entry 1 + i after node i.

    A tensor, or its like.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """Whole rows for sequences and entries, single numbers for sequences, entries and tokens."""
        ...


class Probabilities:
    """Distributions that are made of the target's logits.

    A CPU makes a row where it is first read: a rule seldom reads past the first rejection, and a softmax over the
    vocabulary is the dearest part of a decoding step after the forwards. Other devices make all rows at once, because
    the host would have to wait to know which are missing.
    """

    def __init__(self, logits: Tensor, owners: Tensor, places: Tensor, sampling: SamplingBatch) -> None:
        """Distributions of ``logits`` [R, V] with penalties and bias, in float32 or float64.

        ``owners`` [R] are their sequences as ``sampling`` numbers them, ``places`` [B, N + 1] the rows after the root
        and after each node, any row for padding.
        """
        lazy = logits.device.type == "cpu"
        self._rows = _LazyRows(logits, owners, sampling) if lazy else sampling.probabilities(logits, owners)
        self._places = places
        self.dtype, self.device = self._rows.dtype, logits.device
        self.shape = torch.Size((*places.shape, logits.shape[-1]))

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """See ``Distributions``."""
        sequences, entries, *tokens = index
        return self._rows[(self._places[sequences, entries], *tokens)]

    def select(self, sequences: Tensor) -> Probabilities:
        """The distributions of some sequences [M]; a row is still made once for all of them."""
        chosen = copy.copy(self)
        chosen._places = self._places[sequences]
        chosen.shape = torch.Size((len(sequences), *self.shape[1:]))
        return chosen


class _LazyRows:
    """Rows [R, V] of probabilities that are made when they are first read."""

    def __init__(self, logits: Tensor, owners: Tensor, sampling: SamplingBatch) -> None:
        self._logits, self._owners, self._sampling = logits, owners, sampling
        self.dtype = logits.dtype
        self._made = recycled(tuple(logits.shape), self.dtype, logits.device)
        self._used = 0
        self._where = torch.full((len(logits),), -1, device=logits.device)  # [R] the row of ``_made``, -1 for none

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
        neighbours = last - first == len(rows) - 1  # they ascend, and copying them would cost
        made = self._made[begin : self._used]  # room for a copy too: new memory costs more than a softmax
        logits = self._logits[first : last + 1] if neighbours else torch.index_select(self._logits, 0, rows, out=made)
        self._sampling.probabilities(logits, self._owners[rows], out=made)
        self._where[rows] = torch.arange(begin, self._used, device=rows.device)
