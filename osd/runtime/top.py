"""The most probable tokens of distributions, and the mass of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from osd.runtime.device import Arriving, to_device
from osd.runtime.native import call_kernel, readable


@dataclass(frozen=True)
class Top:
    """The k most probable tokens of n distributions: ``ids``, ``logp`` [n, k], and the rest's log-mass ``tail`` [n]."""

    ids: Tensor
    logp: Tensor
    tail: Tensor

    @classmethod
    def joined(cls, parts: Iterable[Top]) -> Top:
        """Return the distributions of all ``parts``, one after the other."""
        fields = zip(*((top.ids, top.logp, top.tail) for top in parts), strict=True)
        return cls(*map(torch.cat, fields))

    def on_host(self) -> Top:
        """Return the distributions on the host, without a copy if they are there already."""
        return Top(*self.arriving().wait())

    def arriving(self) -> Arriving:
        """Start to copy the fields to the host; return the copies in the order of the fields."""
        return Arriving([self.ids, self.logp, self.tail])

    def at(self, places: Sequence[int]) -> Top:
        """Return a copy of the distributions at the indices ``places``."""
        chosen = torch.tensor(places, device=self.ids.device)
        return Top(self.ids[chosen], self.logp[chosen], self.tail[chosen])

    def part(self, start: int, stop: int) -> Top:
        """Return a view of the distributions ``start`` to ``stop - 1``."""
        return Top(self.ids[start:stop], self.logp[start:stop], self.tail[start:stop])


def most_probable(
    logits: Tensor, rows: Sequence[int] | NDArray[np.int64], k: int, support: Tensor | None = None
) -> Top:
    """Return the ``k`` most probable tokens of each of the n ``rows`` of logits [.., vocabulary].

    ``support`` [vocabulary] are the target ids of the columns; None if a column's index is its id. The kernel reads
    float32 on a CPU and lists the lower of two equally probable ids first; PyTorch reads everything else.
    """
    k = min(k, logits.shape[-1])
    result = _native(logits, rows, k) if readable(logits) else reference(logits, rows, k)
    return result if support is None else Top(support[result.ids], result.logp, result.tail)


def _native(logits: Tensor, rows: Sequence[int] | NDArray[np.int64], k: int) -> Top:
    count = len(rows)
    numbers = torch.tensor(rows, dtype=torch.int64)
    result = Top(torch.empty(count, k, dtype=torch.int64), torch.empty(count, k), torch.empty(count))
    call_kernel(
        "osd_top",
        "no memory for the most probable tokens",
        logits.data_ptr(),
        numbers.data_ptr(),
        count,
        logits.shape[-1],
        k,
        result.ids.data_ptr(),
        result.logp.data_ptr(),
        result.tail.data_ptr(),
        torch.get_num_threads(),
    )
    return result


def reference(logits: Tensor, rows: Sequence[int] | NDArray[np.int64], k: int) -> Top:
    """Return ``most_probable`` by PyTorch, for logits on any device and of any dtype."""
    chosen = logits.flatten(0, -2)[to_device(rows, logits.device)]
    values, ids = chosen.topk(k, -1)
    logp = values - chosen.logsumexp(-1, keepdim=True)
    rest = (1.0 - logp.double().exp().sum(-1)).clamp_min(1e-12).log()
    return Top(ids, logp, rest.float())
