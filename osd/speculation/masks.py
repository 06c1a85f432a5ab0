"""Masks of tokens that must not come after the nodes of a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Constraint(Protocol):
    """What one sequence may say, as a function of the tokens that it goes on with."""

    @property
    def vocabulary(self) -> int:
        """Tokens that a mask tells about."""
        ...

    def allowed(self, path: tuple[int, ...]) -> np.ndarray | None:
        """[vocabulary] bool, which tokens may come after a path of a draft; None where the path itself may not."""
        ...


def forbid(
    logits: Tensor,
    rows: Sequence[int],
    constraints: Sequence[Constraint | None],
    paths: Sequence[Sequence[int]],
    support: Tensor | None,
) -> None:
    """Take from some ``rows`` of logits [R, V], in place, what their constraints do not allow after their paths.

    Paths have the last token first, then -1. With ``support`` [V] the columns are these tokens. A row of which nothing
    would be left stays whole: behind a token that p excludes, or where a drafter knows none of those allowed. Whatever
    is drawn there is rejected, because p is 0 for it or for what stands above it.
    """
    columns = None if support is None else support.cpu().numpy()
    for row, constraint, path in zip(rows, constraints, paths, strict=True):
        if constraint is None:
            continue
        mask = constraint.allowed(tuple(token for token in reversed(path) if token >= 0))
        if mask is None:
            continue
        forbidden = ~(mask if columns is None else mask[columns])
        if forbidden.all():
            continue
        if logits.device.type == "cpu":
            # NumPy does it in one thread: a row is too little for several.
            logits[row].numpy()[forbidden] = -math.inf
        else:
            logits[row].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf)
