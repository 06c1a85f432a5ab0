"""Tensors of a target that a drafter reads too, without a copy where the target is in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.runtime.interface import Target


def held_once(target: Target | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The ``tensors``, each [vocabulary, hidden], or the ``target``'s embedding in place of those that are the same."""
    if target is None:
        return tensors
    theirs = target.embedding
    return tuple(theirs if _same(theirs, mine) else mine for mine in tensors)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
