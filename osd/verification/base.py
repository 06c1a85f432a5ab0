"""Interface of the verification rules, and the verification of greedy drafts."""

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
    """Result of the verification of B drafts.

    Attributes:
        path: [B, deepest] int64, the accepted nodes in order from the root, then -1.
        accepted: [B] int64, number of accepted nodes.
        token: [B] int64, the token after the accepted nodes: a correction after a rejection, else a bonus token.
    """

    path: Tensor
    accepted: Tensor
    token: Tensor


class Rule(ABC):
    """Lossless verification rule.

    Attributes:
        name: of the rule, in settings.
        draws: ways of choosing siblings for which the rule is lossless.
        chains_only: whether each node must have at most one child.
        fixed_width: whether the number of children of a node must not depend on the tokens of these children.
    """

    name: ClassVar[str]
    draws: ClassVar[frozenset[Draw]]
    chains_only: ClassVar[bool] = False
    fixed_width: ClassVar[bool] = False

    @abstractmethod
    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Decide which draft tokens stay; the output has the same distribution as tokens drawn from the target.

        All tensors are on the device of ``p``.

        Args:
            draft: of B sequences. A sequence without nodes is decoded plainly.
            p: [B, N + 1, V], the target's distributions under the sampling settings, in float32 or float64: entry 0
                after the root, entry 1 + i after node i. Entries of padding are undefined.
            noise: of the B sequences.
        """
        ...


def residual(p: Tensor, q: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the distribution after a rejection, norm(d) [M, V], and the mass [M] of d = (weight p - q)+.

    The mass is 0 only if a rejection has probability 0. Rounding may still lead to this case; the result is then p.

    Args:
        p: [M, V], distributions of the target.
        q: [M, V], distributions of the drafter.
        weight: [M], factors of p; None for 1.
    """
    # The difference stays negative and is divided by its negative sum, which saves a pass over the vocabulary.
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
"""Function that verifies the draft of a greedy request: ``follow``, or a replacement for measurements."""


def follow(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
    """Return the nodes of a draft on the path of the most probable tokens, and the token after this path.

    Args:
        tokens: of the nodes.
        parents: of the nodes, each before its children; ``ROOT`` for the root.
        best: the most probable token after the root, then after each node.
    """
    at, path = ROOT, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == best[1 + at]:
            at = node
            path.append(node)
    return path, best[1 + at]
