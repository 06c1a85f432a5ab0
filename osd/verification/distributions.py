"""The target's distributions of a round, as verification rules read them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from osd.runtime.memory import recycled
from osd.verification.sampling import SamplingBatch


class Distributions(Protocol):
    """p [B, N + 1, V] of B sequences, entry 0 after the root and entry 1 + i after node i: a tensor, or its like."""

    @property
    def shape(self) -> torch.Size:
        """B, N + 1 and V."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers, float32 or float64."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """Whole rows for sequences and entries, single numbers for sequences, entries and tokens."""
        ...


class MadeProbabilities:
    """Distributions that are there, ``rows`` [R, V], and which of them each sequence has: ``places`` [B, N + 1]."""

    def __init__(self, rows: Tensor, places: Tensor) -> None:
        """Read ``rows`` as they are."""
        self._rows, self._places = rows, places
        self.dtype, self.device = rows.dtype, rows.device
        self.shape = torch.Size((*places.shape, rows.shape[-1]))

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """See ``Distributions``."""
        sequences, entries, *tokens = index
        return self._rows[(self._places[sequences, entries], *tokens)]


class LazyProbabilities:
    """Distributions that are made of the target's logits where they are first read.

    A rule seldom reads past the first rejection, and a softmax over the vocabulary is the dearest part of a round after
    the forwards.
    """

    def __init__(self, logits: Tensor, owners: Tensor, places: Tensor, sampling: SamplingBatch) -> None:
        """Make nothing yet, of ``logits`` [R, V] with penalties and bias, in float32 or float64.

        ``owners`` [R] are their sequences as ``sampling`` numbers them, ``places`` [B, N + 1] the rows after the root
        and after each node, any row for padding.
        """
        self._logits, self._owners, self._places, self._sampling = logits, owners, places, sampling
        self.dtype = logits.dtype
        self.device = logits.device
        self.shape = torch.Size((*places.shape, logits.shape[-1]))
        self._made = recycled(tuple(logits.shape), self.dtype, self.device)
        self._used = 0
        self._where = torch.full((len(logits),), -1, device=self.device)  # [R] the row of ``_made``, -1 for none

    def __getitem__(self, index: tuple[Tensor, ...], /) -> Tensor:
        """See ``Distributions``; the first read of a row makes all of it."""
        sequences, entries, *tokens = index
        rows = self._places[sequences, entries]
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
        self._where[rows] = torch.arange(begin, self._used, device=self.device)
