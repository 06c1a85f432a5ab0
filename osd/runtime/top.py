"""The most probable tokens of distributions, and the mass of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.runtime.device import Arriving, sent
from osd.runtime.native import kernels


@dataclass(frozen=True)
class Top:
    """The k most probable tokens of n distributions: ``ids``, ``logp`` [n, k], and the rest's log-mass ``tail`` [n]."""

    ids: Tensor
    logp: Tensor
    tail: Tensor

    def on_host(self) -> Top:
        """The same on the host."""
        return Top(*self.arriving().here())

    def arriving(self) -> Arriving:
        """Its fields, in their order, on their way to the host."""
        return Arriving([self.ids, self.logp, self.tail])

    def at(self, places: Sequence[int]) -> Top:
        """Some of the distributions."""
        chosen = torch.tensor(places, device=self.ids.device)
        return Top(self.ids[chosen], self.logp[chosen], self.tail[chosen])

    def part(self, start: int, stop: int) -> Top:
        """The distributions ``start`` to ``stop``."""
        return Top(self.ids[start:stop], self.logp[start:stop], self.tail[start:stop])


def top(logits: Tensor, rows: Sequence[int], k: int, support: Tensor | None = None) -> Top:
    """Summarise the n ``rows`` of logits [.., vocabulary] by the ``k`` most probable tokens of each.

    ``support`` [vocabulary] are the target ids of the columns; without it they are the target's. The kernel reads
    float32 on a CPU, PyTorch everything else.
    """
    k = min(k, logits.shape[-1])
    found = _native(logits, rows, k) if orders_equals(logits) else reference(logits, rows, k)
    return found if support is None else Top(support[found.ids], found.logp, found.tail)


def orders_equals(logits: Tensor) -> bool:
    """Whether ``top`` puts the first of equals first, as the kernel does."""
    readable = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    return readable and kernels() is not None


def _native(logits: Tensor, rows: Sequence[int], k: int) -> Top:
    library = kernels()
    assert library is not None  # noqa: S101
    count = len(rows)
    numbers = torch.tensor(rows, dtype=torch.int64)
    found = Top(torch.empty(count, k, dtype=torch.int64), torch.empty(count, k), torch.empty(count))
    failed = library.osd_top(
        logits.data_ptr(),
        numbers.data_ptr(),
        count,
        logits.shape[-1],
        k,
        found.ids.data_ptr(),
        found.logp.data_ptr(),
        found.tail.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the most probable tokens")
    return found


def reference(logits: Tensor, rows: Sequence[int], k: int) -> Top:
    """The same by PyTorch, for what the kernel does not read."""
    chosen = logits.flatten(0, -2)[sent(rows, logits.device)]
    values, ids = chosen.topk(k, -1)
    logp = values - chosen.logsumexp(-1, keepdim=True)
    rest = (1.0 - logp.double().exp().sum(-1)).clamp_min(1e-12).log()
    return Top(ids, logp, rest.float())
