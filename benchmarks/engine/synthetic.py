"""Forced acceptance, to measure an engine independently of its drafter; the output is not the model's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from osd.engine.policy import Policy
from osd.verification import Verdict
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import ROOT, DraftBatch, Draw


class Synthetic:
    """Rule that keeps a share ``acceptance`` of the longest path of each draft on average and ignores the target.

    The target still computes everything; only the decision differs.
    """

    name: ClassVar[str] = "synthetic"
    draws: ClassVar[frozenset[Draw]] = frozenset(Draw)
    chains_only: ClassVar[bool] = False
    fixed_width: ClassVar[bool] = False

    def __init__(self, acceptance: float, seed: int = 0) -> None:
        """Keep a share between 0 and 1."""
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be between 0 and 1, not {acceptance}")
        self._acceptance, self._random = acceptance, random.Random(seed)  # noqa: S311 - not a secret

    def walk(self, tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        """Return the kept path and the token after it, see ``osd.verification.base.Walk``."""
        path = longest_path(parents)
        length = self._acceptance * len(path)
        kept = path[: int(length) + (self._random.random() < length % 1)]
        return kept, best[1 + (kept[-1] if kept else ROOT)]

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        """Return the verdict, see ``Rule.verify``; the token after the kept path is drawn from p."""
        trees = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.sizes.tolist(), strict=True)
        unused = [ROOT] * (1 + draft.tokens.shape[1])
        paths = [self.walk(tokens[:size], parents[:size], unused)[0] for tokens, parents, size in trees]
        accepted = torch.tensor([len(path) for path in paths], device=p.device)
        padded = [path + [-1] * (draft.tokens.shape[1] - len(path)) for path in paths]
        last = torch.tensor([path[-1] if path else ROOT for path in paths], device=p.device)
        after = p[torch.arange(len(paths), device=p.device), 1 + last]
        path = torch.tensor(padded, dtype=torch.int64, device=p.device).view(draft.tokens.shape)
        return Verdict(path, accepted, noise.pick(after, Purpose.RESIDUAL, accepted))


def longest_path(parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root to the first of the deepest nodes."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    path: list[int] = []
    node = depths.index(max(depths)) if depths else ROOT
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def force_acceptance(policy: Policy, acceptance: float) -> Policy:
    """Return ``policy`` with forced acceptance as its rule."""
    rule = Synthetic(acceptance)
    return replace(policy, rule=rule, walk=rule.walk)
