"""Verification of the draft trees of a decoding step; the entry point, which chooses the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from osd.runtime.device import to_device
from osd.runtime.native import kernels, readable
from osd.verification.base import Rule, Verdict, Walk, follow
from osd.verification.descent import NaiveRule
from osd.verification.distributions import Probabilities
from osd.verification.draws import AcceptedPath, VerificationBatch, follow_draws, is_softmax
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, SamplingParams, most_probable
from osd.verification.tree import DraftBatch


@dataclass(frozen=True)
class PendingVerdicts:
    """Result of a verification that may still be on the device.

    Attributes:
        drafts: the verified drafts.
        known: accepted paths that are already on the host, by sequence.
        compared: sequences whose path is found by ``walk`` along ``tokens``.
        tokens: the target's token at each row of these sequences.
        walk: function that follows a draft along its tokens.
        verdicts: sequences and the verdict of a rule on them.
    """

    drafts: VerificationBatch
    known: dict[int, AcceptedPath] = field(default_factory=dict)
    compared: Sequence[int] = ()
    tokens: Tensor | None = None
    walk: Walk = follow
    verdicts: Sequence[tuple[Sequence[int], Verdict]] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """Int64 tensors whose values ``decide`` needs."""
        tokens = [] if self.tokens is None else [self.tokens]
        verdicts = [part for _, v in self.verdicts for part in (v.path, v.accepted, v.token)]
        draft = self.drafts.draft if self.drafts.pending else None
        return [*tokens, *verdicts, *(() if draft is None else (draft.tokens, draft.sizes))]

    def decide(self, read: Sequence[Any]) -> list[tuple[list[int], list[int], int]]:
        """Return the tokens of each draft, its accepted nodes and the token after them.

        Args:
            read: values of ``tensors`` as nested lists.
        """
        numbers, trees, paths = iter(read), self.drafts.trees, dict(self.known)
        if self.drafts.pending:
            chains = zip(*read[-2:], trees, strict=True)
            trees = [(tokens[:size], parents[:size]) for tokens, size, (_, parents) in chains]
        if self.tokens is not None:
            after, rows = iter(next(numbers)), self.drafts.rows
            for b in self.compared:
                tokens, parents = trees[b]
                paths[b] = self.walk(tokens, parents, list(islice(after, rows[b]))[: 1 + len(tokens)])
        for sequences, _ in self.verdicts:
            for b, path, accepted, token in zip(sequences, *islice(numbers, 3), strict=True):
                paths[b] = path[:accepted], token
        return [(tokens, *paths[b]) for b, (tokens, _) in enumerate(trees)]


def verify(drafts: VerificationBatch, logits: Callable[[], Tensor], best: Tensor | None = None) -> PendingVerdicts:
    """Decide which draft tokens the target accepts, without waiting for a device.

    - Greedy drafts are compared with the most probable tokens.
    - Drafts of repeatable requests and of the rule ``naive`` are compared with tokens drawn from p, which is lossless
      for every draft. The C kernel does this if it can read the logits and the settings satisfy ``is_softmax``, else
      PyTorch.
    - The rule verifies all other drafts.

    A CPU computes p only along the accepted path; other devices compute all rows.

    Args:
        drafts: of B sequences.
        logits: function that returns the target's logits [R, V] with penalties, for each sequence after the root and
            after each node.
        best: the most probable tokens [R] if they are known, for greedy drafts.
    """
    every, known = range(len(drafts.trees)), {}
    if drafts.settings[0].temperature == 0:
        best = most_probable(logits()) if best is None else best
        return PendingVerdicts(drafts, compared=every, tokens=best, walk=drafts.walk)
    scores = logits()
    on_host = scores.device.type == "cpu" and not drafts.pending
    compared = [b for b in every if isinstance(drafts.rule, NaiveRule) or drafts.settings[b].repeatable]
    judged = sorted({*every}.difference(compared))
    if on_host and readable(scores):
        known = follow_draws(scores, drafts, [b for b in compared if is_softmax(drafts.settings[b])])
        compared = [b for b in compared if b not in known]
    if len(known) == len(every):
        return PendingVerdicts(drafts, known)
    target = _Target(drafts, scores)
    tokens = target.draw(compared) if compared and not on_host else None
    parts = [(NaiveRule(), compared if on_host else ()), (drafts.rule, judged)]
    verdicts = [(sequences, target.judge(rule, sequences)) for rule, sequences in parts if sequences]
    return PendingVerdicts(drafts, known, compared, tokens, verdicts=verdicts)


def uses_drawn_children(rule: Rule, settings: Sequence[SamplingParams], device: torch.device) -> bool:
    """Return whether ``verify`` uses ``VerificationBatch.drawn_children``: the C kernel verifies all drafts."""
    kernel = device.type == "cpu" and kernels() is not None
    return kernel and isinstance(rule, NaiveRule) and all(is_softmax(s) and not s.repeatable for s in settings)


class _Target:
    """Distributions of the target after the nodes of drafts, and the noise of their verification."""

    def __init__(self, drafts: VerificationBatch, logits: Tensor) -> None:
        rows, self.device, self.drafts = drafts.rows, logits.device, drafts
        steps, self.first = zip(*drafts.keys, strict=True)
        self.noise = Noise.of_seeds([settings.seed for settings in drafts.settings], steps, self.device)
        begins, widest = accumulate(rows, initial=0), range(max(rows))
        places = [first + min(i, count - 1) for first, count in zip(begins, rows, strict=False) for i in widest]
        owners = to_device([b for b, count in enumerate(rows) for _ in range(count)], self.device)
        sampling = SamplingBatch.of(drafts.settings, self.device)
        self.p = Probabilities(logits, owners, to_device(places, self.device).view(len(rows), -1), sampling)

    def judge(self, rule: Rule, sequences: Sequence[int]) -> Verdict:
        """Return the verdict of a rule on the drafts of some sequences; ``naive`` uses the keys of ``drafts``."""
        draft = self.drafts.draft or DraftBatch.chosen(self.drafts.trees, self.device)
        chosen = to_device(sequences, self.device)
        arguments = draft.select(chosen), self.p.select(chosen), self.noise.rows(chosen)
        if isinstance(rule, NaiveRule):
            return rule.verify(*arguments, to_device([self.first[b] for b in sequences], self.device))
        return rule.verify(*arguments)

    def draw(self, sequences: Sequence[int]) -> Tensor:
        """Return tokens [n] drawn from p as by ``NaiveRule``, after the root and each node of some sequences."""
        owners: list[int] = []
        entries: list[int] = []
        index: list[int] = []
        for b in sequences:
            depths = [self.first[b]]
            for parent in self.drafts.trees[b][1]:
                depths.append(1 + depths[1 + parent])
            owners += [b] * len(depths)
            entries += range(len(depths))
            index += depths
        rows, nodes, depth = (to_device(part, self.device) for part in (owners, entries, index))
        return self.noise.rows(rows).pick(self.p[rows, nodes], Purpose.BONUS, depth)
