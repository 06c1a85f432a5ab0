"""Masks of tokens that must not come after the nodes of a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Constraint(Protocol):
    """What one sequence may say, as a function of the tokens that it goes on with."""

    def allowed(self, path: tuple[int, ...]) -> Tensor | None:
        """[vocabulary] bool, which tokens may come after a path of a draft; None where the path itself may not."""
        ...


def forbid(
    logits: Tensor,
    constraints: Sequence[Constraint | None],
    paths: Sequence[Sequence[int]],
    support: Tensor | None,
) -> list[int]:
    """Take from logits [R, V], in place, what the constraint of each row does not allow after its path.

    Paths have the last token first, then -1. With ``support`` [V] the columns are these tokens. A row of which nothing
    would be left stays whole: behind a token that p excludes, or where a drafter knows none of those allowed. Whatever
    is drawn there is rejected, because p is 0 for it or for what stands above it.

    Returns:
        The rows that have a constraint.
    """
    rows, masks = [], []
    for row, (constraint, path) in enumerate(zip(constraints, paths, strict=True)):
        if constraint is not None:
            rows.append(row)
            masks.append(constraint.allowed(tuple(token for token in reversed(path) if token >= 0)))
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return rows
    anything = torch.ones_like(known)
    allowed = torch.stack([anything if mask is None else mask for mask in masks]).to(logits.device)  # [n, vocabulary]
    if support is not None:
        allowed = allowed[:, support]
    allowed |= ~allowed.any(-1, keepdim=True)
    logits[rows] = logits[rows].masked_fill(~allowed, -math.inf)
    return rows
