"""What every verification rule takes and gives, and what all of them do where p is one-hot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from osd.verification.distributions import Distributions
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, DraftBatch, Draw


@dataclass(frozen=True)
class Verdict:
    """What the target keeps of B drafts.

    ``path`` [B, deepest] int64 the accepted nodes from the root on, then -1; ``accepted`` [B] int64 how many they are;
    ``token`` [B] int64 the token that follows them, a correction after a rejection or a bonus after a whole path.
    """

    path: Tensor
    accepted: Tensor
    token: Tensor


class Rule(ABC):
    """A lossless verification rule.

    ``draws`` are the ways of drawing siblings that it may verify, ``chains_only`` says that every node must have at
    most one child, ``fixed_width`` that the number of children of a node must not depend on the children drawn there.
    """

    name: ClassVar[str]
    draws: ClassVar[frozenset[Draw]]
    chains_only: ClassVar[bool] = False
    fixed_width: ClassVar[bool] = False

    @abstractmethod
    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Decide which drafted tokens stay, so that the output is distributed as if drawn from the target alone.

        ``draft`` are those of B sequences; one without nodes is decoded plainly. ``p`` [B, N + 1, V] are the target's
        distributions as made by the sampling settings, row 0 after the root and row 1 + i after node i, in float32 or
        float64; rows of padding mean nothing. Everything is on the device of ``p``.
        """
        ...


def residual(p: Tensor, q: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What p has left after a rejection: ``norm((weight p - q)+)`` [M, V] and the mass [M] before normalising.

    ``p`` and ``q`` are [M, V], ``weight`` [M] is 1 without one. The mass is 0 only where a rejection has probability 0;
    rounding may still lead there, and p itself is then what is left.
    """
    # Less than nothing, and divided by less than nothing in the end: one pass over the vocabulary fewer.
    left = (q - p if weight is None else torch.addcmul(q, p, weight[:, None], value=-1)).clamp_(max=0)
    mass = -left.sum(-1)
    gone = mass <= 0
    left /= torch.where(gone, 1.0, -mass)[:, None]
    if left.device.type != "cpu":
        left = torch.where(gone[:, None], p, left)
    elif gone.any():
        left[gone] = p[gone]
    return left, mass


Walk = Callable[[Sequence[int], Sequence[int], Sequence[int]], tuple[list[int], int]]
"""How a draft is verified that was decoded greedily: as ``follow`` does, but for measurements."""


def follow(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
    """The nodes of a draft on the path of most probable tokens, and the token after them.

    ``parents`` come before their nodes; ``best`` is the most probable token after the root, then after each node.
    """
    at, path = ROOT, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == best[1 + at]:
            at = node
            path.append(node)
    return path, best[1 + at]
